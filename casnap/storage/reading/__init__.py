"""A repository: nodes and chunks by digest, at whichever place has them.

Imports ``commit_log``, ``packs`` and ``lookup``. Begin with ``repository.py``.
"""
