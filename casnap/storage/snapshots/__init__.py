"""Snapshots by name, what each holds, and which of them stay.

Imports all other rooms of ``storage``. Begin with ``table.py``.
"""
