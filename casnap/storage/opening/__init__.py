"""Find the store of a path, make it or open it; errors tell what else is at the path.

This room imports ``commit_log`` and ``reading``. Begin with ``opening.py``, then read
``location.py``.
"""
