"""What a writer puts: packs, segments, and the commit that makes them the next root.

Imports ``commit_log``, ``packs``, ``lookup`` and ``reading``. Begin with ``session.py``.
"""
