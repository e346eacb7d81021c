"""Threads, buffers and the environment. Knows neither stores nor tensors.

Imports only :mod:`casnap.errors`. Begin with ``threads.py``.
"""
