"""The bytes of a store, as pure functions and records; ``docs/format.md`` describes them.

Imports only :mod:`casnap.errors`. Begin with ``records.py``; ``grid.py`` says how a tensor is cut.
"""
