"""The mirror of a store: another store that gets each snapshot, in the background.

Imports ``transfer`` and ``storage``; only the public classes and the command import it. Begin with
``mirror.py``, then ``notes.py``.
"""
