"""What a place can do, tried: whether it can hold a store, and how fast.

It uses a backend as others do, and the calls of the system. Nothing but the command and
``casnap.doctor`` uses it. Imports ``storage`` and ``backends``. Begin with ``doctor.py``, then read
any probe in ``folder_probes.py``.
"""
