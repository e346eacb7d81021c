"""Maintain a store: collect garbage, check, repair, compare snapshots, measure usage.

Imports ``storage`` and ``state``, and no other verb. It alone may look into the rooms of
``storage``: who collects, checks and repairs must know packs. Begin with ``gc_plan.py``, ``gc.py``
and ``check.py``; ``automatic.py`` begins collections that nobody has asked for.
"""
