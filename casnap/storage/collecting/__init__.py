"""Collecting garbage: packs that no snapshot needs are condemned, and deleted after a grace.

Imports each other room of ``storage``; none imports it. Begin with ``plan.py`` and ``gc.py``;
``automatic.py`` begins collections that nobody has asked for.
"""
