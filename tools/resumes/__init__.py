"""Right trainings, killed again and again: ``python -m tools.resumes --kills 100``.

Each resume must be proven equal by ``casnap prove``: a difference is an error of casnap, of a
trainer, or of the training. Those with trainers need the python of ``make test-integrations``.
"""
