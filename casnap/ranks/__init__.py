"""Communication of ranks: collectives that carry errors, and the connections below them.

Imports ``format`` and ``runtime``. Begin with ``comm.py``.
"""
