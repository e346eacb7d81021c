"""The bytes side: a repository of chunks, trees and commits on any backend. Never imports torch.

Its rooms, each above those before it:

- ``log``: the roots of a store, what they say of it, and put-if-absent, on which both rest.
- ``packs``: files of many chunks, how they are written and read.
- ``lookup``: in which packs a chunk lies: the index, and what this host and process remember.
- ``reading``: a repository: nodes and chunks by digest, with the caches of this host.
- ``writing`` and ``places``: new packs, segments and commits; where a store is, and how it is made.
- ``snapshots``: the table of snapshots, what each holds, and which of them stay.

Imports ``backends``, ``format`` and ``runtime``. Begin with ``reading/repository.py`` and
``writing/session.py``.
"""
