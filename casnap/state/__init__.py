"""The state side: turn a state into leaves with paths, and back. Does no I/O.

Begin with ``flatten.py``. This folder imports ``format``, ``runtime`` and ``errors``, but nothing
from ``storage``, ``ranks`` or ``backends``.
"""
