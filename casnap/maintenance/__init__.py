"""Maintain a store: check, repair, measure usage.

Imports ``storage``, ``state``, ``backends`` and lower layers. It alone imports
``storage/inspecting.py``: checking and repairing need to know packs. Begin with ``check.py``, then
read ``survey.py``. The garbage collector is not here, but in ``storage/collecting``.
"""
