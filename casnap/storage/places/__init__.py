"""Where a store is, what else lies there, and how a store is made.

Imports ``commit_log`` and ``reading``. Begin with ``location.py``.
"""
