"""The part of a take for many ranks: agree, divide the work, exchange parts of split cells.

A single process agrees with nobody and hashes all that it holds. This folder imports the layers
that :mod:`casnap.take` imports, and capture, staging and hashing from there. Begin with
``division.py``.
"""
