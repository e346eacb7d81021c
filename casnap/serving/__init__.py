"""Folders of safetensors that are kept at the newest snapshot, for inference engines.

They may import ``files/``, the verbs, and what is below these. Begin with ``pull.py``, then
``writing.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from casnap.serving.options import FollowEvent, PullOptions, PullReport
from casnap.serving.version import verify

if TYPE_CHECKING:
    from casnap.serving.follower import AppliedVersion, Follower

__all__ = ["AppliedVersion", "FollowEvent", "Follower", "PullOptions", "PullReport", "verify"]


def __getattr__(name: str) -> Any:
    # A pull needs no torch.
    if name in ("AppliedVersion", "Follower"):
        from casnap.serving import follower

        value = globals()[name] = getattr(follower, name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
