"""The bytes side: chunks, trees, the index and commits on any backend. Never imports torch.

Imports ``backends``, ``format`` and ``runtime``. Begin with ``objects.py`` (reading) and
``commit.py`` (writing).
"""
