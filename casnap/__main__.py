"""``python -m casnap``, which is the command ``casnap``."""

from __future__ import annotations

from casnap.cli import main

main()
