"""A bucket, or any other URI of fsspec: requests, retries, and what each server's errors mean.

Imports the modules of :mod:`casnap.backends`, ``local/system_errors.py``, ``format``, ``runtime``
and ``errors``. Begin with ``backend.py``, then ``client.py``.
"""
