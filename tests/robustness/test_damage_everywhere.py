"""Damage in every region of every kind of object: the right answer or a typed error, everywhere.

The regions follow from the format. In each some bits are flipped, and each object is cut off at
and around every edge between two regions. Whatever is done to a store then, nothing that a snapshot
needs may be deleted, and ``check`` reports what it promises to.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import casnap.storage.lookup.index
from casnap import NewStore, StateDict, Store
from casnap.errors import CasnapError
from casnap.format.digest import DIGEST_SIZE
from casnap.format.names import MARKER
from casnap.format.records import PackId, SegmentId, pack_key, root_key, segment_key
from casnap.maintenance.survey import Survey
from casnap.storage.commit_log.roots import COPIES
from casnap.storage.lookup.index_cache import MemoryCache
from tests.support.faults import CHUNK, assert_equal, files, memory_folder
from tests.support.layouts import (
    Layout,
    Region,
    config_layout,
    pack_layout,
    plain_layout,
    root_layout,
    segment_layout,
)

STEPS = {"a": 2, "run/b": 3}
STRANGER = "another of its kind"
ORPHAN, TEMPORARY = PackId(bytes(5) + b"\1" + b"o" * 10), f"tmp/{'0' * 24}"


@lru_cache
def expected(step: int) -> dict[str, dict[str, Any]]:
    """Return a tensor of five chunks (so a list), others of two and one, and a tree of leaves."""
    return {
        "model": {
            "frozen": torch.arange(80_000, dtype=torch.float32),
            "weight": torch.arange(20_000, dtype=torch.float32) * (step + 1),
            "bias": torch.full((64,), float(step)),
            "notes": ["x" * 100, {"step": step}],
        },
        "opt": {f"{i:03}": i + step for i in range(100, 130)},
    }


def state_of(step: int) -> dict[str, StateDict]:
    return {
        key: StateDict({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in d.items()})
        for key, d in expected(step).items()
    }


def make(folder: Path) -> None:
    """Make a store of raw and compressed chunks, with condemned packs and files of no root."""
    store = Store(folder, create=NewStore(chunk_size=CHUNK))
    for name, step in {"a": 2, "old_0": 0, "old_1": 1}.items():
        store.take(state_of(step), name, metadata={"step": step})
    store.configure(codec="zstd")
    store.take(state_of(3), "run/b", metadata={"step": 3})
    store.delete("old_0")
    assert store.gc(grace=3600, repack=0).waiting_packs > 0
    store.delete("old_1")
    orphan = folder / "casnap-store" / pack_key(ORPHAN)
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(next((folder / "casnap-store/packs").rglob("?" * 32)).read_bytes())
    path_of(folder, TEMPORARY).write_bytes(b"cut off" * 9)


def path_of(folder: Path, key: str) -> Path:
    """Return where an object or marker is."""
    return folder / key if MARKER in key else folder / "casnap-store" / key


def keys_in(folder: Path) -> set[str]:
    return {name.removeprefix("casnap-store/") for name in files(folder)}


# --- the store --------------------------------------------------------------------------------


class Sample:
    """A store that is damaged over and over, and put back as it was.

    Attributes:
        folder: Where it is.
        content: The bytes of its files, by key.
        answers: What it answers while it is whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make(folder)
        self.content = {key: path_of(folder, key).read_bytes() for key in sorted(keys_in(folder))}
        # The copy of a root goes when another root comes.
        self.lasting = {key for key in self.content if not key.startswith(COPIES)}
        self.answers = {name: ask(self.open()) for name, ask in QUESTIONS.items()}
        survey = Survey(self.open()._view.repository)
        survey.run()
        assert not survey.damages
        self.survey = survey

    def open(self, **options: bool) -> Store:
        casnap.storage.lookup.index._damaged.clear()
        return Store(self.folder, create=False, **options)

    def layouts(self, kind: str) -> list[Layout]:
        newest = root_key(self.survey.root.seq)
        content = self.content
        if kind == "config":
            return [config_layout("casnap.json", content["casnap.json"])]
        if kind == "newest root":
            return [root_layout(newest, content[newest])]
        if kind == "older roots":
            return [root_layout(root_key(n), content[root_key(n)]) for n in (4,)]
        if kind == "segments":
            keys = [segment_key(SegmentId(ref.id)) for ref in self.survey.root.segments]
            return [segment_layout(key, content[key]) for key in keys]
        if kind == "what is never read":
            keys = [TEMPORARY, f"run/b/{MARKER}", f"{COPIES}/{self.survey.root.seq}"]
            orphan = pack_layout(pack_key(ORPHAN), content[pack_key(ORPHAN)], self.survey)
            return [*(plain_layout(key, content[key]) for key in keys), orphan]
        keys = [key for key in content if key.startswith("packs/") and key != pack_key(ORPHAN)]
        sort = {"packs of chunks": b"CASNAPp1", "packs of nodes": b"CASNAPt1"}[kind]
        return [
            pack_layout(key, content[key], self.survey)
            for key in keys
            if content[key][-DIGEST_SIZE - 8 : -DIGEST_SIZE] == sort
        ]

    def reset(self) -> None:
        """Put every file back as it was."""
        for key in keys_in(self.folder) - self.content.keys():
            path_of(self.folder, key).unlink()
        for key, content in self.content.items():
            path = path_of(self.folder, key)
            if not path.exists() or path.stat().st_size != len(content):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def put(self, key: str, content: bytes) -> None:
        path_of(self.folder, key).write_bytes(content)


def names_of(store: Store) -> list[str]:
    return [s.name for s in store.snapshots()]


def restored(store: Store, name: str) -> bool:
    state = state_of(STEPS.get(name, 8) + 5)
    store[name].restore(state)
    for key, child in state.items():
        assert_equal(child.data, expected(STEPS.get(name, 8))[key])
    return True


def part(store: Store) -> bool:
    tensor = store["a"].read_object("model/frozen", index=slice(30_000, 40_000))
    assert torch.equal(tensor, torch.arange(30_000, 40_000, dtype=torch.float32))
    return True


QUESTIONS: dict[str, Callable[[Store], object]] = {
    "open": lambda s: s.chunk_size,
    "list": names_of,
    "restore a": lambda s: restored(s, "a"),
    "restore run/b": lambda s: restored(s, "run/b"),
    "read": lambda s: s["run/b"].read_object("0/model/notes"),
    "part": part,
    "manifest": lambda s: list(s["run/b"].get_manifest()),
    "diff": lambda s: repr(s.diff("a", "run/b")),
    "usage": lambda s: repr(s.usage()),
}


@pytest.fixture(scope="module")
def sample(_cache_dir: Path) -> Iterator[Sample]:
    """Return a store under a cache that is cold each time: it is kept in memory, and forgotten."""
    with memory_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(casnap.storage.lookup.index, "open_cache", lambda *_: MemoryCache())
        yield Sample(folder / "store")


# --- cases ------------------------------------------------------------------------------------


class Case(NamedTuple):
    """An object as it is damaged."""

    layout: Layout
    what: str
    content: bytes
    found_by: str


def chosen(layouts: list[Layout], thorough: bool) -> list[tuple[Layout, list[Region]]]:
    """Choose the first and the last region of each sort: of each object, or (quickly) of all."""
    groups = [[layout] for layout in layouts] if thorough else [layouts]
    ends = set()
    for group in groups:
        sorts: dict[str, list[tuple[str, Region]]] = {}
        for layout in group:
            for region in layout.regions:
                sort = re.sub(r"\d+", "", region.name)
                sorts.setdefault(sort, []).append((layout.key, region))
        ends |= {end for found in sorts.values() for end in (found[0], found[-1])}
    return [(x, [region for region in x.regions if (x.key, region) in ends]) for x in layouts]


def flips(
    layout: Layout, regions: list[Region], raw: bytes, choose: random.Random, thorough: bool
) -> Iterator[Case]:
    short = 16 if thorough else 2
    for region in regions:
        places = list(range(region.start, region.stop))
        if len(places) > short:
            places = [choose.choice(places)] + (places[:1] + places[-1:]) * thorough
        for at in places:
            bit = choose.randrange(8)
            flipped = raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]
            yield Case(layout, f"bit {bit} of byte {at} ({region.name})", flipped, region.found_by)


def cuts(layout: Layout, regions: list[Region], raw: bytes, thorough: bool) -> Iterator[Case]:
    """Yield the object cut off at edges, one byte before and one behind; or at one of these."""
    edges = sorted({edge for r in regions for edge in (r.start, r.stop)[: 1 + thorough]})
    near = (-1, 0, 1)
    lengths = {e + by for i, e in enumerate(edges) for by in (near if thorough else [near[i % 3]])}
    for length in sorted(n for n in lengths | {0} if 0 <= n < len(raw)):
        yield Case(layout, f"cut off at {length}", raw[:length], layout.found_by)


def others(layout: Layout, raw: bytes, of_the_kind: list[bytes]) -> Iterator[Case]:
    yield Case(layout, "zeros", bytes(len(raw)), layout.found_by)
    yield Case(layout, "garbage behind", raw + b"\0garbage", layout.found_by)
    yield Case(layout, "twice", raw * 2, layout.found_by)
    for other in of_the_kind:
        if other != raw:
            yield Case(layout, STRANGER, other, layout.found_by)


def assert_typed(sample: Sample, case: Case, error: CasnapError, asked: str) -> None:
    """The error says which store, and what in it."""
    text = str(error)
    assert str(sample.folder) in text, (asked, case.what, text)
    names = {case.layout.key, *case.layout.names}
    assert any(name in text for name in names), (asked, case.layout.key, case.what, text)


def ask(sample: Sample, case: Case, name: str, question: Callable[[Store], object]) -> Any:
    """Return an answer, or the typed error that stands for it."""
    try:
        return question(sample.open())
    except CasnapError as e:
        assert_typed(sample, case, e, name)
        # Damage to an object that no root names does no harm.
        assert case.found_by or case.layout.key == "casnap.json", (case.layout.key, case.what)
        return e


def check_case(sample: Sample, case: Case) -> None:
    """Call every operation on a damaged store, and check that none of them loses anything."""
    try:
        sample.put(case.layout.key, case.content)
        look(sample, case)
        collect(sample, case)
        sample.reset()
        sample.put(case.layout.key, case.content)
        take(sample, case)
    finally:
        sample.put(case.layout.key, sample.content[case.layout.key])
        sample.reset()


def look(sample: Sample, case: Case) -> None:
    hurt = False
    for name, question in QUESTIONS.items():
        answer = ask(sample, case, name, question)
        hurt |= isinstance(answer, CasnapError)
        if not isinstance(answer, CasnapError) and answer != sample.answers[name]:
            # What is missing, or cut off, has the store read as of an older root, and said so.
            told = sample.open().check().warnings
            assert any("is as of root" in warning for warning in told), (name, case.what)
    for data in (False, True):
        check_check(sample, case, data, hurt)


def collect(sample: Sample, case: Case) -> None:
    """A collector deletes nothing because of damage: without that, everything is there again."""
    foreseen = ask(sample, case, "dry run", lambda s: s.gc(grace=0, dry_run=True))
    assert keys_in(sample.folder) == sample.content.keys()
    collected = ask(sample, case, "gc", lambda s: s.gc(grace=0, repack=0.5))
    assert isinstance(foreseen, CasnapError) == isinstance(collected, CasnapError)
    key = case.layout.key
    if path_of(sample.folder, key).exists():
        sample.put(key, sample.content[key])
    if not keys_in(sample.folder) >= sample.lasting:
        for name in STEPS:
            restored(sample.open(), name)


def take(sample: Sample, case: Case) -> None:
    """What is taken is whole once that is which it relied on."""
    snapshot = ask(sample, case, "take", lambda s: s.take(state_of(8), "new"))
    sample.put(case.layout.key, sample.content[case.layout.key])
    assert keys_in(sample.folder) >= sample.lasting
    if not isinstance(snapshot, CasnapError):
        restored(sample.open(), "new")


def check_check(sample: Sample, case: Case, data: bool, hurt: bool) -> None:
    """A check reports what it promises to, by the key; and a whole store is whole."""
    report = ask(sample, case, "check", lambda s: s.check(data=data))
    if isinstance(report, CasnapError):
        assert case.layout.key == "casnap.json"
        return
    result = {damage.object for damage in (*report.damages, *report.history)}
    if case.what == STRANGER and case.layout.key.startswith("index/"):
        # It may be as long, and is whole; so what it does not list is missed instead, if needed.
        assert result or not hurt
        return
    promised = case.found_by == "structure" or (data and case.found_by == "data")
    where = (data, case.layout.key, case.what, report.damages)
    assert case.layout.key in result if promised else not result, where


KINDS = [
    "config",
    "newest root",
    "older roots",
    "segments",
    "packs of chunks",
    "packs of nodes",
    "what is never read",
]


ALIKE = {
    "newest root": 4,
    "older roots": 6,
    "segments": 5,
    "packs of chunks": 6,
    "packs of nodes": 9,
    "what is never read": 6,
}
"""Of how many cases one is tried quickly: a seal covers all of a root, and the packs are many."""


def test_a_whole_store(sample: Sample) -> None:
    """All objects are covered, and without damage every operation works."""
    assert sample.open().check(data=True).ok
    layouts = [layout for kind in KINDS for layout in sample.layouts(kind)]
    assert {layout.key for layout in layouts} >= {
        key for key in sample.content if not key.startswith("roots/") and MARKER not in key
    }
    names = {region.name.partition(":")[0] for layout in layouts for region in layout.regions}
    assert names >= {"raw chunk", "compressed chunk", "gap", "node", "list of digests", "manifest"}
    assert names >= {"list of leaves", "leaf of a tree", "leaf of the table", "deltas", "lost"}


def damage_all(sample: Sample, kind: str, thorough: bool, note: Callable[[str, int], None]) -> None:
    choose = random.Random(kind)
    counts: Counter[str] = Counter()
    layouts = sample.layouts(kind)
    contents = [sample.content[layout.key] for layout in layouts]
    for layout, regions in chosen(layouts, thorough):
        raw = sample.content[layout.key]
        cases = {
            "flips": flips(layout, regions, raw, choose, thorough),
            "cuts": cuts(layout, regions, raw, thorough),
            "others": others(layout, raw, contents if thorough else contents[:1]),
        }
        step = 1 if thorough else 3 * ALIKE.get(kind, 1)
        for sort, found in cases.items():
            for case in islice(found, choose.randrange(step), None, step):
                check_case(sample, case)
                counts[sort] += 1
    for sort, count in counts.items():
        note(sort, count)
    print(f"{kind}: {dict(counts)}")


@pytest.mark.parametrize("kind", KINDS)
def test_damage(sample: Sample, kind: str, record_property: Callable[[str, int], None]) -> None:
    damage_all(sample, kind, False, record_property)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_more_damage(
    sample: Sample, kind: str, record_property: Callable[[str, int], None]
) -> None:
    damage_all(sample, kind, True, record_property)
