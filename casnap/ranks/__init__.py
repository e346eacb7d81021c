"""Communication of ranks: collectives that carry errors, and the connections that they use.

This folder imports ``format``, ``runtime`` and ``errors``; nothing of ``storage``, ``state`` or
``backends``. Begin with ``comm.py``.
"""
