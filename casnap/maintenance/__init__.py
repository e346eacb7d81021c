"""Maintain a store: check, repair, compare snapshots, measure usage.

Imports ``storage`` and ``state``, and no other verb. It alone imports ``storage/inspecting.py``:
checking and repairing need to know packs. Begin with ``check.py``, then ``survey.py``. The
garbage collector is a room of ``storage``.
"""
