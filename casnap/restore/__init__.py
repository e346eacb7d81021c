"""Restore a state, or read one object: find the chunks, read, verify, copy in place.

Imports ``storage``, ``state``, ``ranks`` and lower layers, and no other verb. Begin with
``restore.py``.
"""
