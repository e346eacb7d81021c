"""Check whether a store is whole: its structure and, on request, every byte."""

from __future__ import annotations

from dataclasses import dataclass, field

from casnap.backends import Backend
from casnap.backends.announcement import NOTE
from casnap.errors import DamagedError, UnavailableError
from casnap.format.records import CONFIG_KEY, pack_key, root_key, segment_key
from casnap.maintenance.config_repair import config_damages
from casnap.maintenance.damage import (
    ALL,
    Damage,
    Hurt,
    history_damages,
    listed_roots,
    other_than_roots,
    root_damages,
)
from casnap.maintenance.survey import Survey
from casnap.runtime.progress import Progress
from casnap.runtime.units import is_number, whole_number
from casnap.storage import Repository
from casnap.storage.inspecting import StoredFiles, put_if_absent_warnings, unknown_markers

# The names right in the folder of a store.
_TOP = {CONFIG_KEY, "roots", "packs", "index", "tmp"}


@dataclass
class CheckReport:
    """The findings of a check.

    Attributes:
        damages: Everything that is wrong; empty if the store is whole.
        unsupported: Data in forms that this version does not know, and so could not check. They may
            be whole.
        history: Older roots that are damaged or lost. No snapshot needs them, and a repair does not
            restore them.
        root: The number of the root that was checked; -1 if the newest root cannot be read.
        snapshots: How many snapshots there are.
        packs: How many packs the index lists.
        chunks: How many different chunks and nodes the index lists.
        stored_bytes: The stored bytes of these chunks and nodes, at all their places.
        read_bytes: How many of these bytes were read and verified.
        sample: The share of chunks and nodes that the check had to read; None if it checked only
            the structure.
        seed: The seed that chose the sample.
        orphans: Packs and segments that the newest root does not name: left over, or about to be
            committed.
        orphan_segments: How many of these are segments of the index. A take that merges small
            segments into a larger one leaves the small ones to the collector.
        orphan_bytes: The bytes of the orphans.
        temporary: Files that are being written, or that dead writers have left.
        temporary_bytes: The bytes of the temporary files.
        warnings: Facts that can hurt the store in the long run: rules of its bucket; files that
            casnap does not know; and markers of snapshots that the store does not have, as after
            its newest root was lost.
    """

    damages: list[Damage] = field(default_factory=list)
    unsupported: list[Damage] = field(default_factory=list)
    history: list[Damage] = field(default_factory=list)
    root: int = -1
    snapshots: int = 0
    packs: int = 0
    chunks: int = 0
    stored_bytes: int = 0
    read_bytes: int = 0
    sample: float | None = None
    seed: int | None = None
    orphans: int = 0
    orphan_segments: int = 0
    orphan_bytes: int = 0
    temporary: int = 0
    temporary_bytes: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the store is whole."""
        return not self.damages

    @property
    def hurts(self) -> list[Hurt]:
        """The parts of snapshots that cannot be restored because of the damages."""
        return sorted(
            {h for d in self.damages for h in d.hurts}, key=lambda h: (h.snapshot, h.path)
        )


def check(
    store: Repository,
    *,
    data: bool = False,
    sample: float | None = None,
    seed: int | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Check a store. Takes and collectors may run at the same time.

    Args:
        store: The store.
        data: Read and verify every chunk and node at each of its places.
        sample: Read and verify a random share of them, above 0 and up to 1.
        seed: Chooses the share; by default a different one each time.
        name: The full name of a snapshot: check only its tree and chunks.
        progress: Called with the current phase, how much of it is done, and the total.

    Returns:
        All damages, each with the snapshots and entries that it hurts.
    """
    if sample is not None and (not is_number(sample) or not 0 < sample <= 1):
        raise ValueError(f"sample is a share, above 0 and up to 1; got {sample!r}")
    if seed is not None and (seed := whole_number(seed)) is None:
        raise TypeError("seed is a whole number")
    if data and sample is not None:
        raise ValueError("data reads all, sample a share; give one of them")
    backend = store.backend
    try:
        survey = Survey(store, progress)
    except DamagedError as e:
        newest = listed_roots(backend)[-1]
        unreadable = Damage("unreadable", root_key(newest), str(e), hurts={ALL: None})
        damages = [*config_damages(store, None), unreadable]
        return CheckReport(damages, history=history_damages(backend, newest))
    damages = config_damages(store, survey.root)
    share = (1.0 if data else None) if sample is None else sample
    survey.run(share=share, seed=seed, only=name)
    if name is not None:
        return _of_one(survey, damages, share, seed)
    stood_in_for, history = root_damages(backend, survey.root.seq)
    report = CheckReport(
        damages=[*damages, *stood_in_for, *survey.damages],
        unsupported=survey.unsupported,
        history=history,
        root=survey.root.seq,
        snapshots=survey.snapshots.count,
        packs=len(survey.index.packs),
        chunks=survey.index.distinct,
        stored_bytes=survey.index.stored_bytes,
        read_bytes=survey.packs.read_bytes,
        sample=share,
        seed=seed,
        warnings=[*_bucket_warnings(backend), *put_if_absent_warnings(backend)],
    )
    if ALL in report.hurts:
        report.warnings += _read_meanwhile(store)
    if report.ok:  # a damaged store could not tell what it holds
        report.warnings += lost_commits(store)
    _count_orphans(backend, survey, report)
    report.warnings += _what_is_read(survey)
    return report


def _what_is_read(survey: Survey) -> list[str]:
    """Return a warning if readers use an older root because the newest one lacks files.

    The list is empty if the index and the table of snapshots are there, or if no root is whole.
    """
    has_index = all(damage.kind != "missing" for damage in survey.packs.unreadable.values())
    if has_index and not survey.snapshots.table_is_lost:
        return []
    older = survey.store.as_of_whole_root()
    if older is None:
        return []
    return [
        f"files that root {survey.root.seq} names are missing, as after a copy that was made while "
        f"the store was written: each read is as of root {older.newest().seq}, the newest whole "
        "one, and nothing can be committed. Copy the store again, or repair it"
    ]


def _of_one(
    survey: Survey, damages: list[Damage], share: float | None, seed: int | None
) -> CheckReport:
    """Return the report on the one snapshot that a survey looked at.

    Args:
        survey: The survey.
        damages: Damages of the store itself. The report has these too.
        share: The share of chunks and nodes that was read; None if none were.
        seed: The seed that chose them.
    """
    digests = {digest.hex() for digest in survey.needed}
    return CheckReport(
        damages=[*damages, *(d for d in survey.damages if d.hurts or d.digest in digests)],
        unsupported=[d for d in survey.unsupported if d.hurts],
        root=survey.root.seq,
        snapshots=survey.snapshots.count,
        packs=len(survey.packs.chosen),
        chunks=len(digests),
        stored_bytes=survey.packs.stored_bytes,
        read_bytes=survey.packs.read_bytes,
        sample=share,
        seed=seed,
    )


def lost_commits(store: Repository) -> list[str]:
    """Return a warning for each marker file that names a commit which the newest root lacks."""
    return [
        f"the marker in {name} names the commit {commit.hex()}, which no snapshot of root "
        f"{store.newest().seq} has. If the folder was not copied there by hand, a newer root was "
        "lost: put it back into roots/ from a backup before the next take and the next gc, or copy "
        "the snapshot back from a mirror by `casnap cp`. Else delete the marker"
        for name, commit in unknown_markers(store).items()
    ]


def _bucket_warnings(backend: Backend) -> list[str]:
    try:
        return backend.bucket_warnings()
    except UnavailableError as e:
        if e.reason != "denied":
            raise
        return [
            "this user may not look at the rules of the bucket (expiration, versions, locks), so "
            "whether they hurt the store is unknown; docs/object-stores.md says which rules do"
        ]


def _read_meanwhile(store: Repository) -> list[str]:
    """Return a warning that readers use an older root until a repair; [] if no root is whole."""
    older = store.as_of_whole_root()
    if older is None:
        return []
    root = older.newest()
    count = len(older.table(root))
    return [
        f"until a repair, the store is read as of root {root.seq}, the newest whole one; its "
        f"snapshots ({count:,}) are not hurt"
    ]


def _count_orphans(backend: Backend, survey: Survey, report: CheckReport) -> None:
    files = StoredFiles(survey.store, survey.root)
    live_ids = {ref.id for ref in survey.root.segments}.union(survey.index.packs)
    keys = [segment_key(ident) for ident in files.segments - live_ids]
    report.orphan_segments = len(keys)
    # An unreadable segment may list any pack, so no pack is known to be left over then.
    if not survey.packs.unreadable:
        keys += [pack_key(ident) for ident in files.packs - live_ids]
    report.orphans, report.orphan_bytes = len(keys), files.size_of(keys)
    report.warnings += _unknown_files(backend, files.others)
    # Notes lie in tmp/ too, and are no leftovers.
    temporary = {
        key: nbytes
        for key, nbytes in backend.sizes("tmp").items()
        if not NOTE.fullmatch(key.removeprefix("tmp/"))
    }
    report.temporary, report.temporary_bytes = len(temporary), sum(temporary.values())


def _unknown_files(backend: Backend, among_packs: list[str]) -> list[str]:
    """Return a warning if the folder of a store has files that this version does not know."""
    strange = {*among_packs, *backend.names("")} - _TOP
    strange.update(other_than_roots(backend))
    if not strange:
        return []
    listed = ", ".join(sorted(strange)[:3]) + (", …" if len(strange) > 3 else "")
    return [
        f"{backend.where('')} holds files that this casnap does not know: {listed:.500}. They take "
        "up space, and no collection deletes them; delete them if you know that nobody needs them"
    ]
