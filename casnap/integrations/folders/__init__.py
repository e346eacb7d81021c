"""Delete the snapshots whose folders were deleted, as trainers and scripts rotate checkpoints.

Imports ``casnap``, ``casnap.errors``, ``casnap.extending`` and the modules beside this folder, and
what the contract ``door`` in pyproject.toml lists. Begin with ``missing.py``, or with
``rotation.py``, which each save of a trainer goes through.
"""

from __future__ import annotations

from casnap.integrations.folders.missing import prune_missing_folders

__all__ = ["prune_missing_folders"]
