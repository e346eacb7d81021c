"""How many examples Hypothesis tries where each takes longer than most; it follows the profile."""

from __future__ import annotations

from hypothesis import settings

FEW = settings().max_examples // 5
"""For what writes a store, starts many threads or asks all ranks of a world."""
