"""Snapshots whose folders somebody deletes, as trainers and scripts rotate checkpoints.

May import ``casnap``, ``casnap.extending`` and the modules beside this folder. Begin with
``missing.py``, or with ``rotation.py``, which each save of a trainer goes through.
"""

from __future__ import annotations

from casnap.integrations.folders.missing import prune_missing_folders

__all__ = ["prune_missing_folders"]
