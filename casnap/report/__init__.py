"""Show a store as one HTML page: what each snapshot holds, adds and changes.

A guest: imports ``casnap`` and ``casnap.extending``. It reads digests and sizes, never a tensor.
Begin with ``facts.py``, which gathers what ``page.py`` shows.
"""
