"""A repository: nodes and chunks by digest, at whichever place has them.

Imports ``log``, ``packs`` and ``lookup``. Begin with ``repository.py``.
"""
