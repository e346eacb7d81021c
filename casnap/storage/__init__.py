"""The bytes side: chunks, the index, commits and the catalog on any backend. Never imports torch.

Four rooms, each above the one before it: ``log``, ``chunks``, ``commits``, ``catalog``. Imports
``backends``, ``format`` and ``runtime``. Begin with ``chunks/objects.py`` (reading) and
``commits/commit.py`` (writing).
"""
