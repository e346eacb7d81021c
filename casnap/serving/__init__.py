"""Folders of safetensors that are kept at the newest snapshot, for inference engines.

A :class:`Follower` fills live tensors instead. This folder is a verb, which ``Store`` calls: its
modules import what the rooms below offer (the contract ``verbs`` in pyproject.toml). Begin with
``pull.py``, then read ``writing.py``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from casnap.serving.options import FollowerOptions, FollowEvent, PullOptions, PullReport
from casnap.serving.version import verify

if TYPE_CHECKING:
    from casnap.serving.follower import AppliedVersion, Follower
    from casnap.serving.handshake import FollowedVersion, FollowerState, Handshake

__all__ = [
    "AppliedVersion",
    "FollowEvent",
    "FollowedVersion",
    "Follower",
    "FollowerOptions",
    "FollowerState",
    "Handshake",
    "PullOptions",
    "PullReport",
    "verify",
]

# A pull needs no torch.
_LATER = {
    "AppliedVersion": "casnap.serving.follower",
    "FollowedVersion": "casnap.serving.handshake",
    "Follower": "casnap.serving.follower",
    "FollowerState": "casnap.serving.handshake",
    "Handshake": "casnap.serving.handshake",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
