"""Questions to all snapshots of a store: whose weights a file has, and the mean of some.

Imports ``storage``, ``state``, lower layers, and three other verbs. A file is read as an import
reads it. A mean is committed as a take is, and its elements are read as a restore reads them.
Begin with ``average.py``.
"""
