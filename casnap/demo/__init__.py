"""The code of ``casnap demo``: a real fine-tuning that is killed by SIGKILL, and resumed.

Begin with :mod:`casnap.demo.show`. Processes of their own do the training
(:mod:`casnap.demo.training`): one is killed, one resumes from the newest snapshot, and one runs
through for comparison. Only these import torch. The demo may import all of casnap, except the
command.
"""
