"""How ranks talk: collectives that carry errors, and the connections that they run on.

Imports ``format`` and ``runtime``. Begin with ``comm.py``.
"""
