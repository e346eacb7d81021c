"""``python -m casnap.cli``."""

from __future__ import annotations

from casnap.cli import main

main()
