"""``casnap report``: one page, whole, true, and harmless whatever the store holds."""

from __future__ import annotations

import colorsys
import json
import math
import re
import shutil
import subprocess
import sys
from html import escape, unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.report.charts import Point, _hue, chart
from casnap.runtime.sizes import size
from casnap.serving.follower import Follower
from tests.support.cli_calls import CHUNK, document, failure, fill, invoke
from tests.support.golden import unpack

VOID = {"meta"}
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
TAGS = {"html", "head", "meta", "title", "style", "body", "main", "section", "h1", "h2", "h3", "p"}
TAGS |= {"div", "span", "b", "ul", "li", "dl", "dt", "dd", "details", "summary", "table", "caption"}
TAGS |= {"thead", "tbody", "tr", "th", "td", "figure", "figcaption", "svg", "g", "path", "text"}
TAGS |= {"line", "defs", "use", "clippath", "rect"}
# For each frame: how wide it is, and each text that lies outside of it, or of the drawing around.
_MEASURE = """
onload = () => {
  const measured = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement, cut = [];
    const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
    let texts = 0;
    for (let node; node = walker.nextNode();) {
      const drawing = node.parentElement.closest("svg"), range = page.createRange();
      const box = drawing ? drawing.getBoundingClientRect() : {left: 0, right: root.clientWidth};
      range.selectNodeContents(node);
      for (const part of range.getClientRects()) {
        texts += 1;
        if (part.left < box.left - 1 || part.right > box.right + 1
            || drawing && (part.top < box.top - 2 || part.bottom > box.bottom + 2))
          cut.push(node.data.slice(0, 60));
      }
    }
    const broken = [...page.querySelectorAll("tbody th")].filter(head => {
      const range = page.createRange();
      range.selectNodeContents(head);
      return head.textContent.length < 7 && range.getClientRects().length > 1;
    }).map(head => head.textContent);
    return {cut, texts, broken, scrollWidth: root.scrollWidth, clientWidth: root.clientWidth};
  });
  document.querySelector("pre").textContent = JSON.stringify(measured);
};
"""


class Page(HTMLParser):
    """A page, parsed strictly: each element is closed, by name and in order.

    Attributes:
        tags: The names of all elements.
        attributes: All attributes.
        texts: All texts, those of drawings too.
        rows: The cells of each row of the tables.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def row_of(self, *cells: str) -> list[str]:
        """Return the cells of the row of a table that begins with some cells."""
        [row] = [row for row in self.rows if row[: len(cells)] == list(cells)]
        return row

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._open and self._open[-1] in ("th", "td"):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("report") / "store")


def made(folder: Path, *arguments: object) -> Page:
    output = folder.parent / "report.html"
    invoke("report", folder, *arguments, "-o", output)
    return Page(output)


def test_it_answers_what_a_person_asks(folder: Path) -> None:
    page = made(folder)
    titles = ["Is it well?", "What does it take up, and why?", "What changed?"]
    titles += ["Which snapshots go next?", "What is owed to the mirror?", "Who serves what?"]
    assert [t for t in page.texts if t in titles] == titles
    store = Store(folder)
    for use in store.usage():
        assert {use.name, size(use.unique_bytes)} <= set(page.texts)
    first, last = 2.5, f"{2.5 / 3:.4g}"
    assert page.row_of("run1", "loss") == ["run1", "loss", f"{first:g}", last, last, "2.5"]
    # One of six chunks differs from take to take, and the step.
    assert "Changed in each of 2 takes: model.weight, progress.step; " in "".join(page.texts)
    assert "in each of 2, 16.7% of it" in page.texts
    assert "in each of 2, 100.0% of it" in page.texts
    assert "The store has no mirror." in page.texts
    assert "No follower has noted itself in the store." in page.texts
    assert "Entries" in page.texts


def test_what_is_not_well_comes_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    for step, loss in enumerate((0.5, 0.4, math.nan, math.inf)):
        metadata = {"loss": loss, "step": step}
        store.take({"model": StateDict(w=torch.ones(9))}, f"run/step_{step}", metadata=metadata)
    page = made(tmp_path / "store")
    assert "run: loss is NaN or infinite in 2 snapshots, first in run/step_2" in page.texts
    assert page.row_of("run", "loss")[3] == "NaN/inf"
    [run] = document("report", tmp_path / "store")["runs"]
    assert [taken["not_finite"] for taken in run["snapshots"]] == [[], [], ["loss"], ["loss"]]


def test_norms_begin_with_the_largest_jump(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK), health=True)
    for step in range(4):
        layers = {f"layers.{i}.weight": torch.full((4,), 1.0 + (step == 2)) for i in range(3)}
        head = torch.full((4,), 10.0 ** (step == 1))
        if step == 3:
            layers["layers.1.weight"][0] = math.nan
        store.take({"model": StateDict(**layers, head=head)}, f"run/step_{step}")
    page = made(tmp_path / "store")
    told = "run: 1 tensor of model.layers.*.weight with NaN or infinite elements in 1 snapshot, "
    assert f"{told}first in run/step_3" in page.texts
    jumps = [row for row in page.rows if len(row) == 2]
    assert jumps == [
        ["Tensors", "Times"],
        ["model.head", "10"],
        ["model.layers.*.weight", "2"],
    ]
    [run] = document("report", tmp_path / "store")["runs"]
    assert run["snapshots"][0]["norms"] == {
        "model.head": 2.0,
        "model.layers.*.weight": pytest.approx(12**0.5),
    }
    assert run["snapshots"][3]["unhealthy"] == {"model.layers.*.weight": 1}


def test_equal_modules_are_one_line(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    for step in range(4):
        layers = {f"layers.{i}.weight": torch.ones(64, 64) * i for i in range(40)}
        lora = {f"layers.{i}.lora_A": torch.full((64,), float(step)) for i in range(40)}
        if step == 2:
            layers["layers.7.weight"] += 1
        state = {"model": StateDict(**layers, **lora, head=torch.ones(4) + (step == 1))}
        store.take(state, f"run/step_{step}")
    texts = made(tmp_path / "store").texts
    [line] = [text for text in texts if text.startswith("Changed in each of 3 takes")]
    assert line == (
        "Changed in each of 3 takes: model.layers.0–6, 8–39.lora_A, model.layers.7.lora_A; in "
        "some: model.head, model.layers.7.weight; never: model.layers.0–6, 8–39.weight."
    )
    assert {"0–6, 8–39", "7", "in 2 of 3, 66.7% of it"} <= set(texts)


def test_rules_say_what_goes_next(folder: Path) -> None:
    page = made(folder, "--keep-last", 1)
    [line] = [text for text in page.texts if text.startswith("With keep_last=1")]
    plan = document("report", folder, "--keep-last", 1)["plan"]
    assert plan["deleted"] == ["run1/step_0", "run1/step_1"]
    # Each has one chunk of its own.
    assert CHUNK < plan["freed_bytes"] < 4 * CHUNK
    assert line == (
        f"With keep_last=1, 2 snapshots go, which frees {size(plan['freed_bytes'])}: run1/step_0, "
        "run1/step_1."
    )
    assert len(Store(folder).snapshots()) == 4
    assert document("report", folder)["plan"] is None
    assert "keep_last" in failure("report", folder, "--keep-last", 0, status=2).replace("-", "_")


def test_what_is_owed_and_who_serves(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", mirror=tmp_path / "mirror")
    store.take({"model": StateDict(x=torch.ones(9))}, "run/step_0")
    store.wait_mirrored(60)
    assert store.mirror is not None
    store.mirror.stop()
    assert f"Nothing: {tmp_path / 'mirror'} has all." in made(tmp_path / "store").texts
    store.take({"model": StateDict(x=torch.zeros(9))}, "run/step_1")
    with Follower(f"{store.uri}/run", {"x": torch.ones(9)}, interval=None) as follower:
        while not (states := store.followers()) or states[0].serving is None:
            follower.update()
        page = made(tmp_path / "store")
    assert any(text.endswith(": run/step_1.") and "lacks 1 snapshot" in text for text in page.texts)
    assert page.row_of(states[0].label)[1:3] == ["run newest", "run/step_1"]
    assert document("report", tmp_path / "store")["owed"]["names"] == ["run/step_1"]


def test_runs_with_a_metric_share_a_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    for run in ("a", "b", "c", "d"):
        for step in range(1 if run == "c" else 3):
            state = {"model": StateDict(w=torch.full((CHUNK,), step))}
            loss = (2 if run == "d" else 1) / (step + 1)
            store.take(state, f"{run}/step_{step}", metadata={"step": 10 * step, "loss": loss})
    page = made(tmp_path / "store")
    [spoken] = [label for name, label in page.attributes if name == "aria-label"]
    # Two runs have equal losses: one curve has both names, so that none is hidden.
    assert spoken == (
        "loss over the step: d goes from 2 to 0.666667, between 0.666667 and 2; "
        "b = a goes from 1 to 0.333333, between 0.333333 and 1"
    )
    assert {"d", "b = a"} <= set(page.texts)
    assert page.tags.count("figure") == 1
    store.take({"model": StateDict(other=1)}, "a/step_3", metadata={"loss": 0.1})
    page = made(tmp_path / "store")
    labels = [label for name, label in page.attributes if name == "aria-label"]
    assert labels[0].startswith("loss over the number of the snapshot: a goes from 1 to 0.1")


def test_a_curve_of_many_points_keeps_its_peaks_and_gaps() -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    values: list[float | None] = [1.0 + i / 1000 for i in range(5000)]
    values[1234], values[2345], values[3456] = 90.0, -80.0, None
    drawn = chart("loss", "step", {"run": [Point(i, y) for i, y in enumerate(values)]})
    assert "run goes from 1 to 5.999, between -80 and 90" in drawn
    assert len(drawn) < 200_000
    # Of a curve of one colour: the top of the peak, the bottom of the low, and the line of the gap.
    [path, *_] = re.findall(r'<path d="([^"]*)"[^>]*stroke: hsl', drawn)
    heights = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", path)]
    assert min(heights) < 20
    assert max(heights) > 100
    assert path.count("M ") == 2
    assert "stroke: var(--bad)" in drawn


def test_the_axis_of_a_curve_that_ends_in_nan_goes_on() -> None:
    """The mark of the first NaN lies where that step is among all, not at the end."""
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    points = [Point(i, 1 / (i + 1) if i < 10 else None) for i in range(21)]
    drawn = chart("loss", "step", {"run": points})
    [mark] = re.findall(r'<path d="M ([\d.]+) [^"]*"[^>]*stroke: var\(--bad\)', drawn)
    [width] = re.findall(r'viewBox="0 0 ([\d.]+)', drawn)[:1]
    assert 0.4 < float(mark) / float(width) < 0.65


def test_it_is_read_aloud_and_by_keyboard(folder: Path) -> None:
    """What a screen reader needs; the browser does the rest, since all is plain HTML."""
    output = folder.parent / "aloud.html"
    store = Store(folder, health=True)
    for step in range(2):
        state = {"model": StateDict(a=torch.full((4,), 10.0**step), b=torch.ones(4))}
        store.take(state, f"healthy/step_{step}", metadata={"loss": step})
    invoke("report", folder, "-o", output)
    page = Page(output)
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert set(levels) == {1, 2, 3}
    assert all(lower <= upper + 1 for upper, lower in pairwise(levels))
    assert ("lang", "en") in page.attributes
    assert page.tags.count("main") == page.tags.count("title") == 1
    # Each table has a name, and each cell a column and a row.
    assert 0 < page.tags.count("table") == page.tags.count("caption")
    scopes = [value for name, value in page.attributes if name == "scope"]
    assert len(scopes) == page.tags.count("th")
    assert scopes.count("row") == len(page.rows) - page.tags.count("table")
    # Each picture has a text, and is no list of marks to the reader.
    pictures = [label for name, label in page.attributes if name == "aria-label"]
    assert all(" over the " in label for label in pictures)
    assert page.attributes.count(("role", "img")) == len(pictures) == page.tags.count("figure")
    assert page.attributes.count(("aria-hidden", "true")) == page.tags.count("svg")
    # The keyboard reaches what opens and closes: no element takes its place in that order away.
    assert page.tags.count("details") == page.tags.count("summary") > 0
    assert not {"tabindex", "autofocus", "accesskey"} & {name for name, _ in page.attributes}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_its_colours_can_be_told_from_the_paper(folder: Path, scheme: str) -> None:
    """As WCAG asks: texts have 4.5 times the light of the paper, or a part of it; curves 3."""
    made(folder)
    style = (folder.parent / "report.html").read_text().split("@media")
    given = dict(re.findall(r"--(\w+): ([^;]+);", style[0]))
    if scheme == "dark":
        given |= re.findall(r"--(\w+): ([^;]+);", style[1])
    paper = light_of(*rgb_of(given["paper"]))
    for name in ("ink", "faint", "bad"):
        assert contrast(light_of(*rgb_of(given[name])), paper) >= 4.5, name
    assert contrast(light_of(*rgb_of(given["accent"])), paper) >= 3
    lightness = float(given["light"].rstrip("%")) / 100
    for number in range(12):
        colour = colorsys.hls_to_rgb(_hue(number) / 360, lightness, 0.65)
        assert contrast(light_of(*colour), paper) >= 3, number


def rgb_of(colour: str) -> list[float]:
    digits = colour.strip("#")
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    return [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]


def light_of(*channels: float) -> float:
    """Return the relative luminance of a colour of sRGB, as WCAG defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


def test_without_what_draws_it_has_no_charts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("report", folder, "-o", tmp_path / "r.html")
    assert "pip install matplotlib" in result.stdout
    page = Page(tmp_path / "r.html")
    assert "figure" not in page.tags
    assert page.row_of("run1", "loss")[2] == "2.5"


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
    assert "in each of 1, 16.7% of it" in page.texts


def test_nothing_is_run_or_loaded(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    evil = '"><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m'
    for step in range(2):
        state = {"<b>model": StateDict(**{evil: torch.full((CHUNK,), step), "&amp;": step})}
        metadata = {evil: step, "big": 1e308, "nan": math.nan, "yes": True, "text": evil}
        store.take(state, f"<i>{step}", metadata=metadata)
    store.tag("<i>1", "<u>kept")
    page = made(tmp_path / "store")
    assert set(page.tags) <= TAGS
    assert not any(name.startswith("on") or name == "src" for name, _ in page.attributes)
    # A drawing refers to its own marks.
    assert all(value.startswith("#") for name, value in page.attributes if name.endswith("href"))
    assert not any("\x1b" in text for text in page.texts)
    assert "<u>kept" in page.texts
    assert any(evil[:20] in text for text in page.texts)
    assert "big" not in page.texts


def test_paths_of_very_many_parts(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    for step in range(2):
        deep = {"a." * 3000 + "w": torch.full((99,), step), "/".join("b" * 3000): torch.ones(99)}
        store.take({"model": StateDict(**deep)}, str(step))
    assert any("a.a.w" in text for text in made(tmp_path / "store").texts)


def test_an_empty_store(tmp_path: Path) -> None:
    Store(tmp_path / "store").make()
    assert "There are no snapshots." in made(tmp_path / "store").texts


def test_it_is_without_what_a_newer_version_wrote(tmp_path: Path) -> None:
    unpack("later", tmp_path / "store")
    output = tmp_path / "report.html"
    said = invoke("report", tmp_path / "store", "-o", output).output
    assert "without 1 snapshot that only a newer casnap can read" in said
    page = output.read_text(encoding="utf-8")
    assert "later feature" not in page
    assert "run, without 1 snapshot that only a newer casnap can read. Made" in page
    told = document("report", tmp_path / "store")
    assert told["unread_count"] == 1
    assert len(Store(tmp_path / "store").snapshots()) == told["snapshot_count"] + 1


def test_norms_are_of_the_snapshots_that_are_compared(tmp_path: Path) -> None:
    """Each reading of health costs time, and only the last snapshots of a run are drawn."""
    store = Store(tmp_path / "store", health=True)
    for step in range(4):
        for run in ("a", "b"):
            store.take({"model": StateDict(w=torch.full((CHUNK,), step + 1.0))}, f"{run}/{step}")
    runs = document("report", tmp_path / "store", "--last", 1)["runs"]
    assert [run["folder"] for run in runs] == ["b", "a"]
    for run in runs:
        assert [bool(each["norms"]) for each in run["snapshots"]] == [False, False, True, True]
        assert run["changes"]["names"] == [f"{run['folder']}/3"]


def test_keys_that_look_like_ranks(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    store.take({"0": StateDict(a=torch.ones(CHUNK))}, "step_0")
    store.take({"1": StateDict(a=torch.ones(CHUNK), b=[torch.ones(CHUNK), 3])}, "step_1")
    page = made(tmp_path / "store")
    assert "in each of 1, 100.0% of it" in page.texts
    assert "b.0–1" in page.texts


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


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
def test_a_browser_shows_all_text(folder: Path, tmp_path: Path) -> None:
    """At 1,280 and 420 pixels nothing is wider than the page, and no text is cut off."""
    store = Store(folder)
    evil = "a_very_long_name_without_any_place_to_break_it_" * 4
    for step, value in enumerate((1e299, -1e299, math.nan, 1e-12)):
        metadata = {"loss": value, evil: step, "tiny": 1 + step * 1e-13}
        state = {"model": StateDict(**{evil: torch.full((CHUNK,), step)})}
        store.take(state, f"{evil}/$_{step}^{{$", metadata=metadata)
        state = {key: StateDict(w=torch.full((CHUNK,), step)) for key in ("model", "optim")}
        Store(tmp_path / "short").take(state, f"run1/step_{step}", metadata=metadata)
    pages = []
    for shown in (folder, tmp_path / "short"):
        made(shown)
        page = (shown.parent / "report.html").read_text()
        pages.append(escape(page.replace("<details>", "<details open>")))
    # Frames of one origin: their parent may measure them. One start of a browser is enough.
    frames = "".join(
        f'<iframe style="width:{width}px;height:9000px" srcdoc="{page}"></iframe>'
        for page in pages
        for width in (1280, 420)
    )
    (tmp_path / "both.html").write_text(f"{frames}<pre></pre><script>{_MEASURE}</script>")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path}", "--dump-dom", (tmp_path / "both.html").as_uri()]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    assert "CONSOLE" not in ended.stderr
    [found] = re.findall("<pre>(.*?)</pre>", ended.stdout, re.DOTALL)
    wide, narrow, *of_short = json.loads(unescape(found))
    for measured in (wide, narrow, *of_short):
        assert measured["cut"] == measured["broken"] == []
        assert measured["scrollWidth"] <= measured["clientWidth"]
        assert measured["texts"] > 100
    assert (wide["clientWidth"], narrow["clientWidth"]) == (1280, 420)
