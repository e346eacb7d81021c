"""Taking a snapshot: capture, share out the work, stage, hash, write what is new, commit.

Imports ``storage``, ``state`` and ``ranks``, and no other verb. Begin with ``take.py``.
"""
