"""Keep folders of safetensors, and live tensors, at the newest snapshot, for inference engines.

A pull keeps a folder; a :class:`Follower` fills live tensors. Imports what lower folders offer (the
contract ``verbs`` in pyproject.toml). Begin with ``pull.py``, then read ``writing.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casnap.runtime.lazy_imports import imported_later as _imported_later
from casnap.serving.options import FollowerOptions as FollowerOptions
from casnap.serving.options import FollowEvent as FollowEvent
from casnap.serving.options import PullOptions as PullOptions
from casnap.serving.options import PullReport as PullReport
from casnap.serving.version import verify as verify

if TYPE_CHECKING:
    # Imported when they are asked for: a pull needs no torch.
    from casnap.serving.follower import AppliedVersion as AppliedVersion
    from casnap.serving.follower import Follower as Follower
    from casnap.serving.handshake import FollowedVersion as FollowedVersion
    from casnap.serving.handshake import FollowerState as FollowerState
    from casnap.serving.handshake import Handshake as Handshake

__getattr__, __all__ = _imported_later(globals())
