"""Maintain a store: check, repair, compare snapshots, measure usage.

Imports ``storage`` and ``state``, and no other verb. It alone may look into the rooms of
``storage``: who checks and repairs must know packs. Begin with ``check.py``. What collects garbage
is a room of ``storage``.
"""
