"""In which packs a chunk lies: the index of a store, and what this host and process remember.

Imports ``commit_log`` and ``packs``. Begin with ``lookup_order.py``, then ``index.py``.
"""
