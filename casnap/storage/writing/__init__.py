"""Write new packs and segments, and commit: put the next root.

This room imports ``commit_log``, ``packs``, ``lookup`` and ``reading``. Begin with ``session.py``.
"""
