"""What a writer puts: packs, segments, and the commit that makes them the next root.

Imports ``log``, ``packs``, ``lookup`` and ``reading``. Begin with ``session.py``.
"""
