"""A folder of this machine or of a network file system: safe paths, durable names, locks.

Imports the contract in :mod:`casnap.backends.base`, ``format`` and ``runtime``. Begin with
``backend.py``.
"""
