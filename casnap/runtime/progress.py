"""The callback by which long operations report their progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called from time to time, from any thread: with the phase, how much is done, and the total."""
