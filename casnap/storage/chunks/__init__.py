"""Chunks: packs, the index that finds chunks in them, and the caches on this host.

Imports ``log``. Begin with ``objects.py`` (reads) and ``new_packs.py`` (writes).
"""
