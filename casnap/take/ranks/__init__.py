"""The part of a take for many ranks: agree, divide the work, exchange parts of split cells.

A single process agrees with nobody and hashes all that it holds. Imports what :mod:`casnap.take`
does, and that folder's capture, staging and hashing. Begin with ``division.py``.
"""
