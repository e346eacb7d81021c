"""Bring snapshots from one store to another: only what the other side lacks is sent.

Imports ``storage``, and no other verb. Begin with ``copy.py``.
"""
