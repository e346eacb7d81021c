"""The state side: a state as leaves with paths, and back; tensors as bytes. Does no I/O.

Imports ``format`` and ``runtime``. Begin with ``flatten.py``.
"""
