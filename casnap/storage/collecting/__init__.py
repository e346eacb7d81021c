"""Collecting garbage: what no snapshot needs is found, condemned, and deleted after its grace.

Imports each other room of ``storage``; none imports it. Begin with ``plan.py`` and ``gc.py``;
``automatic.py`` begins collections that nobody has asked for.
"""
