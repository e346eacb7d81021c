"""Copy snapshots from one store to another: send only chunks that the other lacks.

Imports ``storage``, ``backends`` and lower layers. Begin with ``copy.py``.
"""
