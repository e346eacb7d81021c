"""Restore a state, or read one object: find the chunks, read, verify, copy in place.

Imports ``storage``, ``state`` and ``ranks``, and no other verb. Begin with ``restore.py``.
"""
