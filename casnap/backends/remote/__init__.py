"""A bucket, or any other URI of fsspec: requests, retries, and what each server's errors mean.

Imports the contract in :mod:`casnap.backends.base`, ``format`` and ``runtime``. Begin with
``backend.py``.
"""
