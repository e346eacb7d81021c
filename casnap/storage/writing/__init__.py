"""Writing: new packs and segments, and the commit that puts the next root.

This room imports ``commit_log``, ``packs``, ``lookup`` and ``reading``. Begin with ``session.py``.
"""
