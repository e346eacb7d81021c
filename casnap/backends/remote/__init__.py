"""Backends of buckets and other places that fsspec can reach: requests, retries, servers' errors.

This folder imports the modules of :mod:`casnap.backends`, ``local_files/system_errors.py``,
``format``, ``runtime`` and ``errors``. Begin with ``backend.py``, then ``client.py``.
"""
