"""Maintain a store: collect garbage, check, repair, compare snapshots, measure usage.

Imports ``storage`` and ``state``, and no other verb. Begin with ``gc.py`` and ``check.py``.
"""
