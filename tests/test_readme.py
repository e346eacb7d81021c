"""README.md and docs/ run as tests, and the code and files that they name exist.

The examples of a page run in order, in one empty working folder:

- ```` ```python ```` blocks share one namespace.
- ```` ```console ```` blocks: each line ``$ command`` runs in bash and must exit with 0. Lines that
  follow it are its expected output, white space aside; ``...`` stands for anything. A command
  without expected output may print what it likes. A ``\\`` at the end continues a command.
- ``s3://my-bucket`` is a bucket of a server that runs on this machine.
- Anything else (```` ```sh ````, ```` ```text ````) is only shown.

``<!-- invisible-code-block: python ... -->`` runs unseen, ``<!-- skip: next -->`` leaves one out.
"""

from __future__ import annotations

import doctest
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from tests.support.servers import Bucket

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if page.exists()]
LINKED = [*PAGES, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]
BUCKET = "s3://my-bucket"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def commands_of(block: str) -> list[tuple[str, str]]:
    """Cut a console block into commands, each with the output that is expected of it."""
    commands: list[tuple[str, str]] = []
    for line in block.splitlines():
        if commands and commands[-1][0].endswith("\\") and not commands[-1][1]:
            commands[-1] = (f"{commands[-1][0]}\n{line.removeprefix('> ')}", "")
        elif line.startswith("$ "):
            commands.append((line.removeprefix("$ "), ""))
        elif commands:
            command, want = commands[-1]
            commands[-1] = (command, f"{want}{line}\n")
        else:
            raise ValueError(f"a console block starts with '$ ', not with {line!r}")
    return commands


def run_console(example: Example) -> str | None:
    """Run the commands of a block; return what went wrong, as Sybil wants it, or None."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    for command, want in commands_of(str(example.parsed)):
        done = subprocess.run(
            ["bash", "-c", command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            return f"$ {command}\nexited with {done.returncode}:\n{done.stdout}"
        if want.strip() and not doctest.OutputChecker().check_output(want, done.stdout, FLAGS):
            return f"$ {command}\nwas to print:\n{want}\nand printed:\n{done.stdout}"
    return None


SYBIL = Sybil(
    parsers=[
        PythonCodeBlockParser(doctest_optionflags=FLAGS),
        CodeBlockParser(language="console", evaluator=run_console),
        SkipParser(),
    ]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if BUCKET in (text := page.read_text()):
        bucket: Bucket = request.getfixturevalue("bucket")
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        page = tmp_path / page.name
        page.write_text(text.replace(BUCKET, bucket.uri))
    for example in SYBIL.parse(page).examples():
        example.evaluate()


def names_in(page: Path) -> set[str]:
    """Return what stands in the code font on a page."""
    return set(re.findall(r"`([\w./]+)`", page.read_text()))


def test_the_architecture_names_code_that_exists() -> None:
    """`storage.roots.put_root` is a name below casnap, `storage/` and `cli/output.py` are files."""
    package = ROOT / "casnap"
    inside = {path.stem for path in package.iterdir()}
    missing = []
    for name in names_in(ROOT / "docs/architecture.md"):
        if re.split(r"[./]", name)[0] not in inside or name == "casnap.json":
            continue
        if name.endswith((".py", "/")):
            found = (package / name).exists()
        else:
            try:
                found = pkgutil.resolve_name(f"casnap.{name}") is not None
            except (ImportError, AttributeError):
                found = False
        if not found:
            missing.append(name)
    assert not missing


def test_the_architecture_names_every_folder() -> None:
    folders = {f"{path.parent.name}/" for path in ROOT.glob("casnap/*/__init__.py")}
    assert folders <= names_in(ROOT / "docs/architecture.md")


def test_every_invariant_is_kept_somewhere() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rows = page.partition("## Where each invariant is kept")[2].splitlines()
    rows = [row for row in rows if row.startswith("| ") and not row.startswith("| invariant")]
    assert rows
    inside = {path.stem for path in (ROOT / "casnap").iterdir()}
    assert not [row for row in rows if not inside & set(re.findall(r"`(\w+)\.", row))]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_exists(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!http)([^)#\s]+)", text)
    assert not [link for link in links if not (page.parent / link).exists()]
    files = {path.name for path in ROOT.glob("tests/**/*.py")}
    tests = re.findall(r"\b(?:tests/[\w/]+|test_\w+)\.py\b", text)
    assert not [t for t in tests if not ((ROOT / t).exists() or ("/" not in t and t in files))]
