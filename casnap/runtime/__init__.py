"""What casnap runs on: threads, buffers, the environment. Knows neither stores nor tensors.

Imports only :mod:`casnap.errors`. Begin with ``threads.py``.
"""
