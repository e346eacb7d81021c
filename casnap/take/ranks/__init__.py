"""The part of a take for many ranks: agree, divide the work, exchange parts of split cells.

A process that takes alone needs none of it. Begin with ``agreement.py``, then read ``division.py``
and ``exchange.py``. This folder imports the layers that :mod:`casnap.take` imports, and five
modules of ``take/``, which do not import it: ``options``, ``plan``, ``capture``, ``staging`` and
``hashing``.
"""
