"""The part of a take for many ranks: agree, divide the work, exchange parts of split cells.

A process that takes alone needs none of it. This folder imports the layers that :mod:`casnap.take`
imports, and from ``take/`` itself options, plan, capture, staging and hashing, which import nothing
of it. Begin with ``division.py``.
"""
