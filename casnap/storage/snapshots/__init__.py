"""Snapshots by name, what each holds, and which of them stay.

Imports all rooms of ``storage`` but ``collecting``. Begin with ``table.py``.
"""
