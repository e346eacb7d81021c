"""Find the snapshots that hold the weights of a file; compute the mean of some snapshots.

Imports ``files``, ``take``, ``restore``, ``storage``, ``state`` and lower layers: it reads a file
as an import does, commits a mean as a take does, and reads its elements as a restore does. Begin
with ``who.py``, then read ``average.py``.
"""
