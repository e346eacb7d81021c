"""Commits: what a writer has put becomes the next root.

Imports ``chunks`` and ``log``. Begin with ``commit.py``.
"""
