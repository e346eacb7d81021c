"""Threads, buffers and the environment, without any knowledge of stores and tensors.

This folder imports only :mod:`casnap.errors`; ``torch_modes.py`` alone imports torch.
Begin with ``threads.py``.
"""
