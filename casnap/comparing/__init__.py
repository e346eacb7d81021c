"""Compare two snapshots, or a live state with a snapshot: which paths differ, and by how much.

``witness.py`` stores the digests of a state, and compares a later state with them.
``standstill.py`` warns if a snapshot has the weights of the step before it.

Imports ``take``, ``restore``, ``storage``, ``state`` and lower layers: a live state is read as a
take reads it, and hashed as a restore with ``reuse=True`` does. Begin with ``diff.py``, which
compares two snapshots, then read ``live.py``. ``changes.py`` is the report of both.
"""
