"""The open store below the public classes, and which store a path or URI is in.

Imports ``take``, ``transfer`` and what is below them. Begin with ``open_store.py``.
"""
