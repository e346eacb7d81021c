"""Snapshots by name, the contents of each, and the rules by which they stay.

This room imports all rooms of ``storage`` except ``collecting``. Begin with ``contents.py``,
then ``changes.py``.
"""
