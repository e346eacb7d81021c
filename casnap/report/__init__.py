"""Show a store as one HTML page: what each snapshot holds, adds and changes.

Only digests and sizes are read, never a tensor. Imports ``casnap`` and ``casnap.extending``.
Begin with ``facts.py``, which gathers what ``page.py`` shows.
"""
