"""The mirror of a store: another store that gets each snapshot, in the background.

Imports ``transfer``, ``storage``, ``backends`` and lower layers. Only the public classes,
``view.py``, ``latest.py`` and the command import it. Begin with ``mirror.py``, then ``notes.py``.
"""
