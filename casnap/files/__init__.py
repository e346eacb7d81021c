"""Snapshots from files of other formats, and files of other formats from snapshots.

Formats: safetensors, ``torch.save``, folders of ``torch.distributed.checkpoint``; and, to be read
only, folders of TorchSnapshot.
"""
