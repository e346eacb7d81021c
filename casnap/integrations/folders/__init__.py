"""Delete the snapshots whose folders were deleted, as trainers and scripts rotate checkpoints.

This folder is a verb, which ``casnap prune`` calls. It imports what lower folders offer (the
contract ``verbs`` in pyproject.toml), and the modules beside it. Begin with ``missing.py``, or with
``rotation.py``, which each save of a trainer goes through.
"""

from __future__ import annotations

from casnap.integrations.folders.missing import prune_missing_folders

__all__ = ["prune_missing_folders"]
