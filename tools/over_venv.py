"""An environment over the packages of the one that runs this: ``python -m tools.over_venv DIR``.

It has no pip of its own. What pip (``DIR/bin/python -m pip``) puts there is only what is missing
below, or of another version.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def make(folder: Path) -> Path:
    """Make an environment, in place of one that is there; return its interpreter."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True
    )
    python = folder / "bin/python"
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    Path(purelib, "casnap-venv.pth").write_text(line)
    return python


if __name__ == "__main__":
    make(Path(sys.argv[1]))
