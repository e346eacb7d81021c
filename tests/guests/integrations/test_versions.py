"""Frameworks that are missing, fail with casnap, or were not tried."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from casnap.integrations.versions import TESTED, Failing, Versions, check_methods, check_version

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.mark.parametrize("framework", TESTED)
def test_a_framework_that_is_missing(framework: str) -> None:
    package = TESTED[framework].package
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    else:
        pytest.skip(f"{framework} is installed")
    wanted = rf"{package}, which is not installed: pip install '/path/to/casnap\[{framework}\]'"
    with pytest.raises(ImportError, match=wanted):
        importlib.import_module(f"casnap.integrations.{framework}")


MSGSPEC = metadata.version("msgspec")
RANGES = {
    "the only one": ((MSGSPEC, MSGSPEC), None),
    "between": (("0.1", "9000"), None),
    "a later patch": (("0.1", MSGSPEC.rpartition(".")[0] + ".0"), None),
    "older": (("9000.0.1", "9000.2"), "9000.0.1 to 9000.2, and this is an older one"),
    "newer": (("0.1", "0.9"), "0.1 to 0.9, and this is a newer one"),
}


@pytest.mark.parametrize("range_", RANGES)
def test_a_version_outside_of_the_range_is_warned_of_once(
    range_: str, caplog: pytest.LogCaptureFixture
) -> None:
    (oldest, newest), warning = RANGES[range_]
    for _ in range(2):
        check_version("some", Versions("msgspec", oldest, newest))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (warning is not None)
    assert all(f"casnap.integrations.some was tested with msgspec {warning}" in s for s in said)


@pytest.mark.parametrize(
    ("first", "below", "refused"),
    [("0.1", "", True), (MSGSPEC, "9000", True), ("0.1", MSGSPEC, False), ("9000", "", False)],
)
def test_a_version_that_is_known_to_fail_is_refused(
    first: str, below: str, *, refused: bool
) -> None:
    failing = Failing(first, below, "it decodes nothing", "msgspec>=9000")
    tested = Versions("msgspec", "0.1", "9000", (failing,))
    if not refused:
        check_version("some", tested)
        return
    wanted = f"msgspec {MSGSPEC}: it decodes nothing. Run: pip install 'msgspec>=9000'"
    with pytest.raises(ImportError, match=wanted):
        check_version("some", tested)


def test_a_framework_whose_methods_have_other_names_is_refused() -> None:
    """They would never be called, and the framework would save by itself."""
    tested = Versions("msgspec", "0.1", "9000")
    check_methods("some", msgspec.Raw, ["copy"], tested)
    wanted = f"msgspec {MSGSPEC}: its Raw has no save, load. .* Run: pip install 'msgspec==9000'"
    with pytest.raises(ImportError, match=wanted):
        check_methods("some", msgspec.Raw, ["save", "copy", "load"], tested)


@pytest.mark.parametrize(
    ("installed", "advised"), [("4.46.3", "4.57.6"), ("3.5", "5.24.0"), ("6.0.0rc1", "5.24.0")]
)
def test_a_tested_version_of_the_same_major_one_is_advised(installed: str, advised: str) -> None:
    """A project that is written for Transformers 4 cannot take 5."""
    assert TESTED["transformers"].instead_of(installed) == f"pip install 'transformers=={advised}'"


def test_an_older_version_is_told_what_to_take(caplog: pytest.LogCaptureFixture) -> None:
    major = int(MSGSPEC.partition(".")[0])
    check_version("other", Versions("msgspec", f"{major}.9000", f"{major}.9001"))
    assert caplog.text.rstrip().endswith(f"or run: pip install 'msgspec=={major}.9001'")


def test_the_page_has_the_ranges_that_were_tested() -> None:
    page = PYPROJECT.with_name("docs") / "compatibility.md"
    for tested in TESTED.values():
        oldest, newest = tested.oldest, tested.newest
        text = oldest if oldest == newest else f"{oldest} to {newest}"
        assert re.search(rf"^\| \[.*\]\(guides/[^)]*\) {text} \|", page.read_text(), re.MULTILINE)
        assert all(f" {version}, " in page.read_text() for version in tested.last_of_majors)


@pytest.mark.parametrize("framework", TESTED)
def test_the_extra_has_the_range_that_was_tested(framework: str) -> None:
    """Without an upper bound, unless all that is newer is known to fail."""
    package, oldest, _, failing, _ = TESTED[framework]
    ends = [f",<{fails.first}" for fails in failing if not fails.below]
    extra = re.search(
        rf"^{framework.replace('_', '-')} = \[(.*)\]$", PYPROJECT.read_text(), re.MULTILINE
    )
    assert extra is not None
    requirements = [found.partition(";")[0] for found in re.findall(r'"([^"]*)"', extra[1])]
    assert f"{package}>={oldest}{''.join(ends)}" in requirements


VLLM = {
    "another version": "__version__ = '0.33.0'",
    "a known version that has changed": "__version__ = '0.32.9'",
    "broken": "raise RuntimeError('no driver')",
    "without a version": "",
}


@pytest.mark.parametrize("vllm", VLLM)
def test_a_vllm_that_casnap_does_not_know_goes_on(
    tmp_path: Path, vllm: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each process of vLLM calls this, also for users who never asked for the backend."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(VLLM[vllm])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    plugin = importlib.import_module("casnap.integrations.vllm")
    with caplog.at_level(logging.DEBUG, "casnap"):
        plugin.register()
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert "has no backend 'casnap'" in caplog.text
    sys.modules.pop("vllm", None)
