"""Compare two snapshots, or a live state with a snapshot: which paths differ, and by how much.

Imports ``storage``, ``state``, lower layers, and two other verbs, ``take`` and ``restore``: a live
state is read as a take reads it, and hashed as a restore with ``reuse=True`` does. Begin with
``changes.py``, the report; ``diff.py`` makes it of two snapshots, ``live.py`` of a live state.
"""
