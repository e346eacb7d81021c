"""Finding the store of a path, making it, opening it; and errors that say what is there instead.

This room imports ``commit_log`` and ``reading``. Begin with ``opening.py`` and ``location.py``.
"""
