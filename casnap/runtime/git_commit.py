"""The git commit of the work tree in which the script of this process lies."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

# Large work trees take longer; their commit stays unknown.
_SECONDS = 1.0
_COMMIT = re.compile(r"^# branch\.oid ([0-9a-f]{40,64})$", re.MULTILINE)
_CHANGE = re.compile(r"^[^#]", re.MULTILINE)


@cache
def commit_of_program() -> str:
    """Return the commit in hex; with ``-dirty`` at the end if tracked files have changed since.

    Return "" if the script lies in no work tree, or if git cannot tell the commit within a second.
    The process asks git once, and only in a work tree. git gets settings by which it starts no
    other program, such as a file system monitor.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        folder = Path(script).resolve().parent if script else Path.cwd()
        if not any((each / ".git").exists() for each in (folder, *folder.parents)):
            return ""
        return _status(folder)
    except (OSError, RuntimeError, ValueError):
        return ""


def _status(folder: Path) -> str:
    import subprocess

    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder)]
    command += ["status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(
            [*command, "--ignore-submodules"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=True,
        )
    except subprocess.SubprocessError:
        return ""
    text = done.stdout.decode(errors="replace")
    commit = _COMMIT.search(text)
    if commit is None:
        return ""
    return f"{commit[1]}-dirty" if _CHANGE.search(text) else commit[1]
