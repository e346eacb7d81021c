"""The repository: an open store, which reads nodes and chunks by digest.

This room imports ``commit_log``, ``packs`` and ``lookup``. Begin with ``repository.py``.
"""
