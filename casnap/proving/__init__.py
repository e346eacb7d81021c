"""Prove that a training resumes: run it whole and killed, and compare what the runs have stored.

Imports only ``casnap``, ``casnap.errors`` and ``casnap.extending``. Begin with ``proof.py``.
``attempts.py`` starts and kills processes, ``causes.py`` says what a difference usually means.
"""
