"""A folder of this machine or of a network file system: safe paths, durable names, locks.

Imports the modules of :mod:`casnap.backends`, ``format``, ``runtime`` and ``errors``. Begin with
``backend.py``.
"""
