"""The version of casnap."""

from __future__ import annotations

__version__ = "1.0.0rc1"
