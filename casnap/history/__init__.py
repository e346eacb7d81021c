"""Work on several snapshots at once: their mean.

Imports ``storage``, ``state``, lower layers, and two other verbs: a mean is committed as a take is,
and its elements are read as a restore reads them. Begin with ``average.py``.
"""
