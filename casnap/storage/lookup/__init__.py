"""Find the pack of a chunk: the index of a store, and the caches of this host and process.

This room imports ``commit_log`` and ``packs``. Begin with ``lookup_order.py``, then ``index.py``.
"""
