"""Finding the store of a path, making one, opening it; and what is there if there is none.

Imports ``commit_log`` and ``reading``. Begin with ``opening.py`` and ``location.py``.
"""
