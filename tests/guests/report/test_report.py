"""``casnap report``: one page, whole, true, and harmless whatever the store holds."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casnap import NewStore, StateDict, Store
from casnap.report.charts import Box, split_box
from casnap.runtime.sizes import size
from tests.support.cli_calls import CHUNK, document, failure, fill, invoke

VOID = {"meta"}


class Page(HTMLParser):
    """A page, parsed strictly: each element is closed, by name and in order.

    Attributes:
        tags: The names of all elements.
        attributes: All attributes.
        texts: All texts, those of titles of drawn things too.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("report") / "store")


def made(folder: Path, *arguments: object) -> Page:
    output = folder.parent / "report.html"
    invoke("report", folder, *arguments, "-o", output)
    return Page(output)


def test_it_shows_each_run(folder: Path) -> None:
    page = made(folder)
    store = Store(folder)
    for use in store.usage():
        assert f"{use.name}: {size(use.unique_bytes)}" in page.texts
        assert use.name in page.texts
    assert [t for t in page.texts if t in ("run1", "run2")] == ["run2", "run1"]
    assert "Metadata: loss" in page.texts
    assert "run1/step_1: 1.25" in page.texts
    # One of six chunks differs from take to take, and the step.
    assert "run1/step_2: 16.7% of model.weight changed" in page.texts
    assert "run1/step_2: 100.0% of progress.step changed" in page.texts
    assert not any("model.bias changed" in text for text in page.texts)
    # The sizes of the last snapshot.
    assert f"weight: {size(6 * CHUNK)}" in page.texts
    assert "Entries" in page.texts
    [span] = [t for t in page.texts if t.endswith("; the rest of that stayed equal")]
    assert span.startswith("run1/step_1 to run1/step_2, of what run1/step_2 holds")


def test_runs_with_a_metric_share_a_chart(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    for run in ("a", "b", "c"):
        for step in range(1 if run == "c" else 3):
            state = {"model": StateDict(w=torch.full((CHUNK,), step))}
            store.take(
                state, f"{run}/step_{step}", metadata={"step": 10 * step, "loss": 1 / (step + 1)}
            )
    page = made(tmp_path / "store")
    assert "loss of each run, over the step" in page.texts
    assert page.tags.count("polyline") == 2
    # The names of snapshots stand below each drawing.
    assert page.texts.count("step_2") > 6
    store.take({"model": StateDict(other=1)}, "a/step_3", metadata={"loss": 0.1})
    page = made(tmp_path / "store")
    assert "loss of each run, over the number of the snapshot" in page.texts
    # One snapshot with one before it is no range, nor is the time of one alone.
    changes = [t.partition(";")[0] for t in page.texts if t.endswith("that stayed equal")]
    assert "a/step_1 to a/step_3, of what a/step_3 holds" in changes
    page = made(tmp_path / "store", "--last", 1)
    changes = [t.partition(";")[0] for t in page.texts if t.endswith("that stayed equal")]
    assert "a/step_3, of what a/step_3 holds" in changes
    assert any(re.fullmatch(r"1 snapshot, \d{4}-\d\d-\d\d \d\d:\d\d", t) for t in page.texts)


def test_the_same_for_programs(folder: Path, tmp_path: Path) -> None:
    facts = document("report", folder, "run1", "-o", tmp_path / "r.html")
    (run,) = facts["runs"]
    assert [taken["metrics"]["step"] for taken in run["snapshots"]] == [0, 1, 2]
    assert run["module_bytes"]["model.weight"] == 6 * CHUNK
    assert facts["live_bytes"] <= facts["stored_bytes"]
    assert run["changes"]["modules"] == ["model.weight", "progress.step"]
    assert run["changes"]["shares"] == [[1 / 6] * 2, [1.0] * 2]
    assert not (tmp_path / "r.html").exists()


def test_it_is_of_a_prefix_and_of_the_last_ones(folder: Path) -> None:
    page = made(folder, "run1", "--last", 1)
    assert "run2" not in page.texts
    assert any("run1/step_2: 16.7%" in text for text in page.texts)
    assert not any("run1/step_1: 16.7%" in text for text in page.texts)


def test_nothing_is_run_or_loaded(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    evil = '"><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m'
    for step in range(2):
        state = {"<b>model": StateDict(**{evil: torch.full((CHUNK,), step), "&amp;": step})}
        metadata = {evil: step, "big": 1e308, "nan": math.nan, "yes": True, "text": evil}
        store.take(state, f"<i>{step}", metadata=metadata)
    store.tag("<i>1", "<u>kept")
    page = made(tmp_path / "store")
    assert set(page.tags) <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "div", "b",
        "table", "tr", "th", "td", "svg", "rect", "text", "line", "polyline", "circle", "section",
    }  # fmt: skip
    assert not any(name.startswith("on") or name in ("href", "src") for name, _ in page.attributes)
    assert not any("\x1b" in text for text in page.texts)
    assert "<u>kept" in page.texts
    assert any(evil[:20] in text for text in page.texts)
    assert not {"Metadata: nan", "Metadata: big"} & set(page.texts)


def test_paths_of_very_many_parts(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    for step in range(2):
        deep = {"a." * 3000 + "w": torch.full((99,), step), "/".join("b" * 3000): torch.ones(99)}
        store.take({"model": StateDict(**deep)}, str(step))
    assert any("a.a.w" in text for text in made(tmp_path / "store").texts)


def test_an_empty_store(tmp_path: Path) -> None:
    Store(tmp_path / "store").make()
    assert "There are no snapshots." in made(tmp_path / "store").texts


def test_keys_that_look_like_ranks(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    store.take({"0": StateDict(a=torch.ones(CHUNK))}, "step_0")
    store.take({"1": StateDict(a=torch.ones(CHUNK), b=[torch.ones(CHUNK), 3])}, "step_1")
    page = made(tmp_path / "store")
    assert any("100.0%" in text and "b.0" in text for text in page.texts)


def test_only_a_report_is_replaced(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "thesis.html"
    mine.write_text("precious")
    assert "is not a report" in failure("report", folder, "-o", mine)
    assert mine.read_text() == "precious"
    assert "is not a folder" in failure("report", folder, "-o", tmp_path / "none" / "r.html")
    assert "not a casnap store" in failure("report", tmp_path, "-o", tmp_path / "r.html")
    assert "run3" in failure("report", folder, "run3", "-o", tmp_path / "r.html")
    assert sorted(tmp_path.iterdir()) == [mine]
    invoke("report", folder, "-o", tmp_path / "r.html")
    invoke("report", folder, "-o", tmp_path / "r.html")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html", "thesis.html"]


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=40))
def test_a_treemap_tiles_its_box(sizes: list[int]) -> None:
    sizes.sort(reverse=True)
    box = Box(3.0, 5.0, 900.0, 400.0)
    boxes = split_box(box, sizes)
    assert len(boxes) == len(sizes)
    for nbytes, part in zip(sizes, boxes, strict=True):
        share = nbytes / sum(sizes)
        assert part.width * part.height == pytest.approx(share * 900 * 400, rel=1e-6, abs=1e-6)
        assert part.x >= 3 - 1e-6
        assert part.y >= 5 - 1e-6
        assert part.x + part.width <= 903 + 1e-6
        assert part.y + part.height <= 405 + 1e-6
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            across = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            down = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert min(across, down) <= 1e-6


@pytest.mark.slow
def test_a_browser_draws_it(folder: Path, tmp_path: Path) -> None:
    """Needs Chromium. A browser lays it out within the page, and reports no error."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    made(folder)
    page = folder.parent / "report.html"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path}", "--window-size=1100,4000", "--dump-dom"]
    ended = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, check=True)
    assert "CONSOLE" not in ended.stderr
    drawn = re.findall("<rect", ended.stdout)
    assert len(drawn) == page.read_text().count("<rect")
