"""Where a store is, what else lies there, and how a store is made.

Imports ``log`` and ``reading``. Begin with ``location.py``.
"""
