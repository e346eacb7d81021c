"""What the bytes of a store are: pure functions and records, as in ``docs/format.md``.

Imports only :mod:`casnap.errors`. Begin with ``records.py``; ``grid.py`` says how a tensor is cut.
"""
