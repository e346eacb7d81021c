"""The backend of a folder: of this machine, or of a network file system.

This folder imports the modules of :mod:`casnap.backends` but the remote ones, ``format``,
``runtime`` and ``errors``. Begin with ``backend.py``.
"""
