"""Folders of safetensors that are kept at the newest snapshot, for inference engines.

They may import ``files/``, the verbs, and what is below these. Begin with ``pull.py``, then
``writing.py``.
"""

from __future__ import annotations

from casnap.serving.options import FollowEvent, PullOptions, PullReport
from casnap.serving.version import verify

__all__ = ["FollowEvent", "PullOptions", "PullReport", "verify"]
