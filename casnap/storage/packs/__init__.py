"""Packs: immutable files of many chunks, how they are filled and how they are read.

This room imports no other room of ``storage``. Begin with ``pack_writer.py``, then
``chunk_reads.py``.
"""
