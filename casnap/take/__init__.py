"""Take a snapshot: capture the state, divide the work, stage, hash, write new chunks, commit.

Imports ``storage``, ``state``, ``ranks`` and lower layers, and no other verb. Begin with
``take.py``. The part for many ranks is in :mod:`casnap.take.ranks`.
"""
