"""Subjects of commits, and lengths of decisions: ``python -m tools.commits``, part of `make check`.

A subject reads ``area: what``, in at most 72 characters. Commits before that was agreed are not
looked at, nor is what a shallow clone lacks.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SINCE = "2026-11-28T23:20:00+00:00"
"""By the date of the commit, so that a clone need not have any earlier one."""
MOST_CHARS, MOST_WORDS = 72, 550
_SUBJECT = re.compile(r"[a-z0-9_./-]+(, [a-z0-9_./-]+)*: \S.*")
_DECISIONS = Path("docs/decisions")


def faults_of(subject: str) -> Iterator[str]:
    """Yield what is wrong with a subject."""
    if len(subject) > MOST_CHARS:
        yield f"has {len(subject)} characters, more than {MOST_CHARS}"
    if not _SUBJECT.fullmatch(subject):
        yield "does not read `area: what`"


def faulty_commits() -> Iterator[str]:
    """Yield a line for each fault of a new commit; none where there is no repository."""
    git = shutil.which("git")
    if git is None:
        return
    command = [git, "log", "--no-merges", f"--since={SINCE}", "--format=%h %s"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        commit, _, subject = line.partition(" ")
        yield from (f"commit {commit} {fault}: {subject}" for fault in faults_of(subject))


def long_decisions() -> Iterator[str]:
    """Yield a line for each decision that is longer than it may be."""
    for path in sorted(_DECISIONS.glob("[0-9]*.md")):
        words = len(path.read_text().split())
        if words > MOST_WORDS:
            yield f"{path} has {words} words, more than {MOST_WORDS}"


if __name__ == "__main__":
    found = [*faulty_commits(), *long_decisions()]
    sys.stdout.writelines(f"{line}\n" for line in found)
    sys.exit(bool(found))
