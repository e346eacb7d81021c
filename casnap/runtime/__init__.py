"""Threads, buffers and the environment, without any knowledge of stores and tensors.

Begin with ``threads.py``. This folder imports only :mod:`casnap.errors`; ``torch_modes.py`` alone
imports torch.
"""
