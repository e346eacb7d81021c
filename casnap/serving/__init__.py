"""Folders of safetensors that are kept at the newest snapshot, for inference engines.

They may import ``files/``, the verbs, and what is below these. Begin with ``pull.py``, then
``writing.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casnap.runtime.later import imported_later
from casnap.serving.options import FollowEvent, PullOptions, PullReport
from casnap.serving.version import verify

if TYPE_CHECKING:
    from casnap.serving.follower import AppliedVersion, Follower
    from casnap.serving.handshake import FollowedVersion, FollowerState, Handshake

__all__ = [
    "AppliedVersion",
    "FollowEvent",
    "FollowedVersion",
    "Follower",
    "FollowerState",
    "Handshake",
    "PullOptions",
    "PullReport",
    "verify",
]

# A pull needs no torch.
__getattr__ = imported_later(
    globals(),
    {
        **dict.fromkeys(("AppliedVersion", "Follower"), "casnap.serving.follower"),
        **dict.fromkeys(
            ("FollowedVersion", "FollowerState", "Handshake"), "casnap.serving.handshake"
        ),
    },
)
