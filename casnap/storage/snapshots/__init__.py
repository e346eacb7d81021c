"""Snapshots by name, the contents of each, and the rules that say which of them stay.

This room imports ``commit_log``, ``reading``, ``writing`` and ``opening``. Begin with
``contents.py``, then ``changes.py``.
"""
