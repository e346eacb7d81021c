"""Copy snapshots from one store to another: send only chunks that the other lacks.

Imports ``storage``, and no other verb. Begin with ``copy.py``.
"""
