"""Threads, buffers and the environment, without any knowledge of stores and tensors.

This room imports only :mod:`casnap.errors`. Begin with ``threads.py``.
"""
