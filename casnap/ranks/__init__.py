"""Communication of ranks: collectives that carry errors, and the connections that they use.

Begin with ``comm.py``. This folder imports ``format``, ``runtime`` and ``errors``, but nothing from
``storage``, ``state`` or ``backends``.
"""
