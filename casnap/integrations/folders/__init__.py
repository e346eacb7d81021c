"""Delete the snapshots whose folders were deleted, as trainers and scripts rotate checkpoints.

``casnap prune`` calls this folder too. So it imports from inside casnap: what lower folders offer
(the contract ``verbs`` in pyproject.toml). Begin with ``missing.py``, then read ``rotation.py``,
which each save of a trainer goes through.
"""

from __future__ import annotations

from casnap.integrations.folders.missing import prune_missing_folders

__all__ = ["prune_missing_folders"]
