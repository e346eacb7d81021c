"""README.md and docs/ run as tests, and the code and files that they name exist.

``tests/support/pages.py`` says how the examples of a page run. ``s3://my-bucket`` is a bucket of a
server that runs on this machine. ``tests/guests/integrations`` runs the guides for trainers and
engines.
"""

from __future__ import annotations

import pkgutil
import re
import signal
from pathlib import Path

import pytest

from casnap.errors import SOURCE
from tests.support.faults import in_child
from tests.support.pages import run_examples
from tests.support.servers import Bucket
from tests.support.torches import HAS_DCP

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if page.exists()]
LINKED = [*PAGES, *(ROOT / f"{name}.md" for name in ("SECURITY", "CHANGELOG", "CONTRIBUTING"))]
FRAMEWORKS = {
    f"{name}.md"
    for name in (
        "lightning",
        "transformers",
        "accelerate",
        "deepspeed",
        "megatron",
        "fine-tuning-tools",
        "torch-checkpointing",
        "torchtitan",
        "data",
        "trackers",
        "vllm",
    )
}
BUCKET = "s3://my-bucket"
WITH_EXAMPLES = [
    page
    for page in PAGES
    if page.name not in FRAMEWORKS
    and (HAS_DCP or "casnap.integrations.dcp" not in page.read_text())
    and re.search(r"^```(python|console)|^<!-- (invis|skip)", page.read_text(), re.MULTILINE)
]


# DCP's own writer warns, before torch 2.13.
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if BUCKET in (text := page.read_text()):
        bucket: Bucket = request.getfixturevalue("bucket")
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        page = tmp_path / page.name
        page.write_text(text.replace(BUCKET, bucket.uri))
    run_examples(page, tmp_path / "work", monkeypatch)


@pytest.mark.parametrize("hidden", ["x = 1", "import math as x", "open('x', 'w').close()"])
def test_what_is_hidden_defines_nothing(
    hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a reader can run a page as it stands."""
    page = tmp_path / "page.md"
    seen = "open('x').close()" if "open" in hidden else "assert x"
    page.write_text(f"<!-- invisible-code-block: python\n{hidden}\n-->\n```python\n{seen}\n```\n")
    with pytest.raises((NameError, AssertionError)):
        run_examples(page, tmp_path / "work", monkeypatch)


PREEMPTED = """
```python
import signal
from casnap import Store, on_preemption

store = Store("run")
with on_preemption(store, {}) as preemption:
    signal.raise_signal(signal.SIGTERM)
    preemption.step(1)
```
"""


def test_a_sigterm_from_outside_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example that handles one does not take it for its own."""
    page = tmp_path / "page.md"
    page.write_text(PREEMPTED)
    status = in_child(lambda: run_examples(page, tmp_path / "work", monkeypatch))
    assert status == -signal.SIGTERM
    assert not (tmp_path / "work/run").exists()


def names_in(page: Path) -> set[str]:
    """Return what stands in the code font on a page."""
    return set(re.findall(r"`([\w./]+)`", page.read_text()))


def test_the_pages_say_from_where_casnap_is_installed() -> None:
    said = [m for page in PAGES for m in re.findall(r"[^\s`']*casnap\[[\w-]+\]", page.read_text())]
    assert said
    assert not [path for path in said if not path.startswith(f"{SOURCE}[")]


def test_the_architecture_names_code_that_exists() -> None:
    """`take.plan.name` is a name below casnap, `storage/` and `cli/output.py` are files."""
    package = ROOT / "casnap"
    inside = {path.stem for path in package.iterdir()}
    missing = []
    pages = ("docs/architecture.md", "docs/devices.md")
    for name in set[str]().union(*(names_in(ROOT / page) for page in pages)):
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


def test_every_page_is_in_the_site() -> None:
    """Each one stands in the nav of mkdocs.yml; all decisions do."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = [page.relative_to(ROOT / "docs") for page in PAGES[1:]]
    assert not [p for p in pages if p.parts[0] != "decisions" and f"- {p}\n" not in nav]


def anchors_of(page: Path) -> set[str]:
    """Return what stands behind a `#` in links to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_what_a_page_links_to_exists() -> None:
    files = {path.name for path in ROOT.glob("tests/**/*.py")}
    for page in LINKED:
        text = page.read_text()
        for link, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text):
            linked = page.parent / link if link else page
            assert linked.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors_of(linked), f"{page}: {link}#{anchor}"
        tests = re.findall(r"\b(?:tests/[\w/]+|test_\w+)\.py\b", text)
        gone = [t for t in tests if not ((ROOT / t).exists() or ("/" not in t and t in files))]
        assert not gone, page
