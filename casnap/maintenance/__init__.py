"""Looking after a store: collect garbage, check, repair, compare, measure.

Imports ``storage``, and no other verb. Begin with ``gc.py`` and ``check.py``.
"""
