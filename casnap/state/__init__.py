"""The state side: turn a state into leaves with paths, and back. Does no I/O.

Imports ``format`` and ``runtime``. Begin with ``flatten.py``.
"""
