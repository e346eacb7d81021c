"""Collecting garbage: packs that no snapshot needs are condemned, and deleted after a grace.

This room imports all others of ``storage`` but ``opening``, and none imports it. Begin with
``gc.py``, then read ``plan.py``; ``automatic.py`` begins collections that no user has asked for.
"""
