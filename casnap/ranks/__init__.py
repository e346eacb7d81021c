"""Communication of ranks: collectives that carry errors, and the connections below them.

Imports ``format``, ``runtime`` and ``errors``; nothing of ``storage``, ``state`` or ``backends``.
Begin with ``comm.py``.
"""
