"""Make snapshots from files of other formats, and files of other formats from snapshots.

The formats are safetensors, ``torch.save`` and folders of ``torch.distributed.checkpoint``. Folders
of TorchSnapshot and torch_checkpointing are read, never written. An import is a take, and an export
reads as a restore does.

Imports ``take``, ``restore``, ``storage``, ``state`` and lower layers. Begin with ``importing.py``,
then read ``exporting.py``.
"""
