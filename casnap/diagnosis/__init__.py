"""Try whether a place can hold a store, and how fast the place is.

The probes call a backend as a take does, and the system itself. Only the command and
``casnap.doctor`` call this folder. Imports ``storage``, ``backends`` and lower layers. Begin with
``doctor.py``, then read any probe in ``folder_probes.py``.
"""
