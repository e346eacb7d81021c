"""The state side: turn a state into leaves with paths, and back. Does no I/O.

Imports ``format``, ``runtime`` and ``errors``; nothing of ``storage``, ``ranks`` or ``backends``.
Begin with ``flatten.py``.
"""
