"""Snapshots from files of other formats, and files of other formats from snapshots.

Formats: safetensors, ``torch.save``, folders of ``torch.distributed.checkpoint``; and, to be read
only, folders of TorchSnapshot and torch_checkpointing. An import is a take, and an export reads as
a restore does.

Imports ``take``, ``restore`` and what these import. Begin with ``importing.py`` and
``exporting.py``.
"""
