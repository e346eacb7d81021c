"""Show a store as one HTML page: what each snapshot holds, adds and changes.

Imports only ``casnap`` and ``casnap.extending``. It reads digests and sizes, never a tensor. Begin
with ``page.py``, then read ``facts.py``, which gathers what the page shows.
"""
