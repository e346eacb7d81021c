"""Packs: immutable files of many chunks or nodes. This room writes and reads them.

It imports no other room of ``storage``. Begin with ``pack_writer.py``, then ``chunk_reads.py``.
"""
