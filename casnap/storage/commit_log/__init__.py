"""The commit log: the roots of a store, its record, and put-if-absent, on which both rest.

This room imports no other room of ``storage``. Begin with ``roots.py``.
"""
