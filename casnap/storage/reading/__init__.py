"""The repository: an open store, from which nodes and chunks are read by digest.

This room imports ``commit_log``, ``packs`` and ``lookup``. Begin with ``repository.py``.
"""
