"""Restore a state, or read one object: find the chunks, read, verify, copy in place.

Begin with ``restore.py``. This folder imports ``storage``, ``state``, ``ranks`` and lower layers.
"""
