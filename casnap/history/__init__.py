"""Work on several snapshots at once: their mean.

Imports ``storage``, ``state``, lower layers, and two other verbs: a mean is committed as a take, and
its elements are read as those of a restore. Begin with
``average.py``.
"""
