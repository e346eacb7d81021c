"""Communication of ranks: collectives that carry errors, and the connections below them.

This room imports ``format`` and ``runtime``. Begin with ``comm.py``.
"""
