"""The bytes of a store, as pure functions and records; ``docs/format.md`` describes them.

This folder imports only :mod:`casnap.errors`. Begin with ``records.py``; ``grid.py`` says how a
tensor is cut into chunks.
"""
