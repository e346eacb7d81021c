"""Take a snapshot: capture the state, divide the work, stage, hash, write new chunks, commit.

Begin with ``take.py``. :mod:`casnap.take.ranks` has what only a take by several ranks needs. This
folder imports ``storage``, ``state``, ``ranks`` and lower layers.
"""
