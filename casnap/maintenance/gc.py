"""Collecting garbage while takes go on.

A root first *condemns* each pack that no snapshot needs. A take that began before and relies on
such a pack *rescues* it when it commits; a later take stores its chunks anew. After the grace, the
collector raises the *fence*: it puts a root that no longer names the pack, and no take that began
before that root can commit any more. Then the pack is deleted. ``docs/commit-protocol.md`` has the
protocol, and why it is safe even if clocks are wrong.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from casnap.backends.base import as_exclusive
from casnap.errors import PLACE_ERRORS, DamagedError, FencedError, StorageFullError
from casnap.format.digest import split_digests
from casnap.format.records import PackId, Root, pack_key, root_key
from casnap.maintenance.marks import Marks
from casnap.maintenance.recent_marks import RecentMarks
from casnap.maintenance.recode import Recoding, recode
from casnap.maintenance.reference_counts import ReferenceCounts
from casnap.maintenance.repack import repack, sparse_packs
from casnap.maintenance.stored_files import StoredFiles, base_of
from casnap.runtime.progress import Progress, ProgressCounter
from casnap.runtime.threads import Crew, run_shielded
from casnap.runtime.units import count_if_given, is_number
from casnap.storage.log.roots import next_root, put_root, release_reserve, with_advice
from casnap.storage.lookup.index import View
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.abandoned_copies import drop_abandoned, without_abandoned
from casnap.storage.writing.retries import Obstacle, again, put_root_after
from casnap.storage.writing.segments import Rewriting, rewrite_segments

_log = logging.getLogger("casnap")
DAY = 86400.0
_SKEW = 60.0
# A collection that goes on from counts copies what is needed of packs where that frees so much.
# What it leaves is for the next one that goes through the whole store.
_WORTH_A_COMMIT = 256 << 10


@dataclass(frozen=True, kw_only=True)
class GcOptions:
    """How to collect; see :meth:`casnap.Store.gc`.

    Attributes:
        grace: How many seconds to keep unreferenced data. By default what the store is set to, else
            24 hours.
        repack: Of packs with less than this share needed, copy the needed part to a new pack.
        dry_run: Only report what would be done.
        exclusive: No other process writes to the store.
        forgotten: For a dry run: full names of snapshots to treat as deleted.
        condemned_until: Free what was condemned up to the root of this number, instead of what was
            condemned before the grace.
        recode_after: Recode all but so many of the newest snapshots of each folder, if the store is
            set to that; None to recode none.
    """

    grace: float | None = None
    repack: float = 0.5
    dry_run: bool = False
    exclusive: bool = False
    forgotten: frozenset[str] = frozenset()
    condemned_until: int | None = None
    recode_after: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        if not is_number(self.repack) or not 0 <= self.repack <= 1:
            raise ValueError(f"repack is a share from 0 (never) to 1; got {self.repack!r}")
        object.__setattr__(
            self, "recode_after", count_if_given("recode_after", self.recode_after, least=0)
        )
        if self.forgotten and not self.dry_run:
            raise ValueError("only a dry run takes snapshots for deleted that are not")


@dataclass
class GcReport:
    """What a collection did, or with ``dry_run`` would do.

    Attributes:
        dry_run: Whether nothing was changed.
        snapshots: How many snapshots were marked.
        live_chunks: How many different chunks and tree nodes they need.
        live_bytes: The stored bytes of these.
        condemned_packs: Packs that no snapshot needs, condemned now.
        condemned_bytes: Their bytes.
        rescued_packs: Condemned packs that are needed, and are no longer condemned.
        repacked_packs: Mostly dead packs whose needed part was copied.
        copied_bytes: The bytes that were copied.
        recoded_snapshots: Older snapshots that were recoded.
        recoded_chunks: Their chunks that have a smaller form now.
        saved_bytes: How many bytes less these chunks take up in that form.
        merged_segments: How many segments fewer the index has.
        fence: The root that the fence was raised to; None if it was not raised.
        deleted_packs: Packs that were deleted.
        deleted_segments: Segments of the index that were deleted.
        freed_bytes: The bytes of everything that was deleted.
        waiting_packs: Condemned packs whose grace is not over.
        waiting_bytes: Their bytes.
        waiting_until: When the grace of the last of them is over, in seconds since the epoch.
        lost_chunks: Chunks that snapshots need and that are known to be lost.
        refused: Unreferenced files that this user may not delete, and why: other users' files in
            a sticky folder. Their owners' collections delete them.
        warnings: Rules of the bucket that can hurt the store, or keep what was deleted.
        seconds: How long it took.
        processor_seconds: How much time of a processor it took, besides that of the threads that
            copy and delete.
    """

    dry_run: bool = False
    snapshots: int = 0
    live_chunks: int = 0
    live_bytes: int = 0
    condemned_packs: int = 0
    condemned_bytes: int = 0
    rescued_packs: int = 0
    repacked_packs: int = 0
    copied_bytes: int = 0
    recoded_snapshots: int = 0
    recoded_chunks: int = 0
    saved_bytes: int = 0
    merged_segments: int = 0
    fence: int | None = None
    deleted_packs: int = 0
    deleted_segments: int = 0
    freed_bytes: int = 0
    waiting_packs: int = 0
    waiting_bytes: int = 0
    waiting_until: float | None = None
    lost_chunks: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    processor_seconds: float = 0.0


def collect(
    store: Repository,
    options: GcOptions,
    progress: Progress | None = None,
    counts: ReferenceCounts | None = None,
) -> GcReport:
    """Collect the garbage of a store.

    Args:
        store: The store.
        options: How.
        progress: Called with the current phase, how much of it is done, and the total.
        counts: What an earlier collection of this process has counted: then only packs that hold
            what nothing refers to since are collected. If it has counted nothing, this one does.

    Raises:
        StoreError: The store cannot be written to, or not safely beside other writers.
        DamagedError: Something could not be read; the message says how to continue.
    """
    started = time.monotonic()
    check_allowed(store, options)

    def work(crew: Crew) -> GcReport:
        def tell(what: str, done: int, total: int) -> None:
            if crew.error is not None:
                # Interrupted: keep what was collected so far.
                raise crew.error
            if progress is not None:
                progress(what, done, total)

        collector = _Collector(store, options, tell, counts)
        try:
            collector.run()
        except StorageFullError as e:
            raise with_advice(e, store.recent()) from e
        except DamagedError as e:
            raise DamagedError(e.what, e.paths, _advice(store, collector.report)) from e
        return collector.report

    with as_exclusive(store.backend, store.backend.exclusive or options.exclusive):
        report = run_shielded(work)
    if report.freed_bytes:
        with suppress(*PLACE_ERRORS):
            report.warnings = store.backend.bucket_warnings()
    report.seconds = time.monotonic() - started
    return report


def _advice(store: Repository, report: GcReport) -> str:
    done = "No more was deleted" if report.freed_bytes else "Nothing was deleted"
    uri = store.backend.uri
    return (
        f"{done}. `casnap check {uri}` says what is hurt, `casnap repair {uri}` saves what can be "
        "saved (--yes in a script); if something stays lost, `casnap rm` of the snapshots "
        "that they name, or `casnap repair --from` with a copy, lets gc continue"
    )


def check_allowed(store: Repository, options: GcOptions) -> None:
    """Check that the garbage of a store may be collected.

    Raises:
        StoreError: The store cannot be written to safely beside other writers.
    """
    if not options.dry_run:
        with as_exclusive(store.backend, store.backend.exclusive or options.exclusive):
            store.check_put_if_absent()


class _Collector:
    def __init__(
        self,
        store: Repository,
        options: GcOptions,
        progress: Progress,
        counts: ReferenceCounts | None = None,
    ) -> None:
        self._store = store
        self._counts = counts
        self._backend = store.backend
        self._options = options
        self._grace = DAY
        self._what = f"{store.backend.uri}: the collection"
        self._progress = progress
        self._files: StoredFiles
        self._rewriting: Rewriting | None = None
        self._would_condemn: set[PackId] = set()
        self._lacks_space = False
        self._is_whole = True
        self.report = GcReport(dry_run=options.dry_run)

    def run(self) -> None:
        began = time.thread_time()
        try:
            self._run()
        except BaseException:
            # It may have been cut off while it counted.
            if self._counts is not None:
                self._counts.clear()
            raise
        finally:
            self.report.processor_seconds += time.thread_time() - began

    def _run(self) -> None:
        root = self._store.recent()
        self._store.check_writable("collect the garbage of", root, dry_run=self._options.dry_run)
        grace = self._options.grace
        if grace is None:
            grace = self._store.settings(root).grace
        self._grace = DAY if grace is None else grace
        if not self._options.dry_run:
            drop_abandoned(self._store)
        self._recode(root)
        again(self._store, self._collect, self._what, tries=2, on_full=self._use_reserve)
        if self._lacks_space and self.report.freed_bytes:
            # Something was deleted, so there may be space for the copies now.
            self._lacks_space = False
            self._collect()
        if self._lacks_space:
            _log.warning(
                "%s: no space is left to copy what is needed out of mostly dead packs, so they "
                "stay; free some space, or wait until the grace of condemned packs is over, and "
                "run gc again",
                self._backend.uri,
            )

    def _use_reserve(self, _error: StorageFullError) -> None:
        release_reserve(self._backend)
        self._options = replace(self._options, repack=0)
        if self._counts is not None:
            # So that this time too all packs are listed: what dead takes have left may be most.
            self._counts.clear()

    def _recode(self, root: Root) -> None:
        after = self._options.recode_after
        if after is None or self._options.dry_run or not self._store.settings(root).recodes:
            return

        def give_up(error: Obstacle) -> None:
            # What was recoded by then stands. On a full disk, what is freed now may make room.
            self._lacks_space = isinstance(error, StorageFullError)

        # If another collector moves what is read, this begins again; what was recoded stays.
        recoding: Recoding | None = again(
            self._store,
            lambda: self._store.read_at_newest(
                lambda root: recode(self._store, root, after, self._progress), lambda: root
            ),
            f"{self._what}, which recodes",
            tries=1,
            give_up=give_up,
        )
        if recoding is None:
            return
        self.report.recoded_snapshots = recoding.snapshots
        self.report.recoded_chunks = recoding.chunks
        self.report.saved_bytes = recoding.before_bytes - recoding.after_bytes

    def _collect(self) -> None:
        self._is_whole = self._counts is None or not self._counts.is_known
        self._list_files(self._store.recent())
        # Another collector may be faster, and delete the copies of this one.
        again(
            self._store,
            lambda: self._store.read_at_newest(self._mark_and_free, self._store.recent),
            self._what,
            tries=None,
        )
        if not self._options.dry_run:
            # A root that does not name them is durable now.
            view = self._store.view()
            self._delete_orphans(view)
            self._note_waiting(view.root.condemned, view.root)

    def _list_files(self, root: Root) -> None:
        self._files = StoredFiles(self._store, root, lists_packs=self._is_whole)

    # --- condemn ---

    def _mark_and_free(self, root: Root) -> None:
        """Mark what is needed; condemn the packs that hold none of it, free what was condemned."""
        view = self._store.index.view(root)
        marks = self._marks(view)
        self._check_missing(marks)
        report = self.report
        report.snapshots, report.live_chunks = marks.snapshots, marks.count
        report.live_bytes = marks.nbytes
        doomed = {p for p, use in marks.uses.items() if not use.needed and p in view.live}
        sparse = sparse_packs(marks, view, self._options.repack)
        garbage = sum(marks.uses[pack].stored - marks.uses[pack].live for pack in sparse)
        if not self._is_whole and garbage < _WORTH_A_COMMIT:
            sparse = []
        if self._options.dry_run:
            report.repacked_packs = len(sparse)
            report.copied_bytes = sum(marks.uses[pack].live for pack in sparse)
            self._would_condemn = doomed.union(sparse)
            self._note_condemned(self._would_condemn, marks.rescue)
            self._next_root(view, root.condemned, root.lost)
            return
        # Left by an earlier run. Deleting takes no space, and may free enough for the copies.
        self._delete_orphans(view)
        copied_to = self._copy_out(marks, view, sparse) if sparse else {}
        try:
            self._condemn_and_free(marks, doomed, set(sparse), copied_to)
        except DamagedError as e:
            newest = self._store.newest()
            if marks.root == root or set(marks.root.segments) <= set(newest.segments):
                raise
            # Another collector has moved what was read of a root after the one at hand.
            raise FencedError(e.what) from e
        if self._lacks_space:
            # What was not copied is looked at again.
            return
        if isinstance(marks, RecentMarks):
            marks.note_done()
        elif self._counts is not None:
            self._counts.segments = view.segments

    def _copy_out(
        self, marks: Marks | RecentMarks, view: View, sparse: list[PackId]
    ) -> dict[bytes, PackId]:
        """Copy what is needed of some packs; return its digests, each with a pack that holds it."""
        copied_to: dict[bytes, PackId] = {}
        total = sum(marks.uses[pack].live for pack in sparse)
        counter = ProgressCounter(self._progress, "copying", total)
        try:
            for copies in repack(self._store, marks, view, sparse, counter.add):
                copied_to |= copies
        except StorageFullError:
            # Packs that are wholly dead can still be condemned.
            self._lacks_space = True
        finally:
            self.report.copied_bytes += counter.done
        # The copies came with new segments, which may be merged away again.
        self._list_files(self._store.recent())
        return copied_to

    def _marks(self, view: View) -> Marks | RecentMarks:
        if self._counts is not None and self._counts.is_known:
            try:
                return RecentMarks(self._store, view, self._counts, self._progress)
            except DamagedError as e:
                # What went was collected before this process counted it.
                _log.debug("%s: all is counted anew: %s", self._backend.uri, e)
        if self._counts is not None:
            self._counts.clear()
        # Otherwise the root names no abandoned copies; those that it names are needed.
        root = without_abandoned(view.root) if self._options.dry_run else view.root
        return Marks(self._store, root, self._progress, self._options.forgotten, self._counts)

    def _check_missing(self, marks: Marks | RecentMarks) -> None:
        unknown = marks.missing.difference(split_digests(marks.root.lost))
        self.report.lost_chunks = len(marks.missing) - len(unknown)
        if unknown:
            raise DamagedError(
                f"{self._backend.uri}: {len(unknown):,} chunks that snapshots need are in no pack, "
                f"such as {min(unknown).hex()}"
            )

    def _condemn_and_free(
        self,
        marks: Marks | RecentMarks,
        dead: set[PackId],
        sparse: set[PackId],
        copied_to: dict[bytes, PackId],
    ) -> None:
        """Put a root that condemns packs, unless a newer root has come to need them.

        It no longer names the packs that were condemned before and whose grace is over.

        Args:
            marks: What is needed. If another writer puts the next root, its needs are added.
            dead: Packs of which nothing is needed.
            sparse: Packs of which little is needed.
            copied_to: The needed digests of the sparse packs, each with another pack that holds it.
        """
        doomed = dead | sparse
        contents: dict[bytes, list[PackId]] = {}
        required: set[bytes] = set()
        returned = set(split_digests(marks.root.lost)) - marks.missing
        before, rescued = marks.root, set[PackId]()

        def prepare(root: Root) -> Root | None:
            nonlocal before, doomed, required, rescued
            before, view = root, self._store.index.view(root)
            fresh = marks.advance(root) if root != marks.root else set()
            doomed = {pack for pack in doomed if pack in view.live}
            if not contents and (sparse or fresh):
                for digest, pack, _ in marks.contents_of(doomed):
                    contents.setdefault(digest, []).append(pack)
                required = set(marks.needed_of(set(contents)))
            required |= fresh & contents.keys()
            for digest in required:
                # A copy that another collector has condemned meanwhile does not count.
                elsewhere = copied_to.get(digest)
                if elsewhere not in view.live or elsewhere in doomed:
                    doomed.difference_update(contents[digest])
            rescued = marks.rescue & root.condemned.keys()
            seq = root.seq + 1
            condemned = {p: self._condemned_since(c, root) for p, c in root.condemned.items()}
            condemned = {p: c for p, c in condemned.items() if p not in rescued}
            condemned |= dict.fromkeys(doomed, seq)
            lost_digests = b"".join(d for d in split_digests(root.lost) if d not in returned)
            return self._next_root(view, condemned, lost_digests)

        new_root = put_root_after(self._store, prepare, self._put)
        self.report.repacked_packs += len(doomed & sparse)
        self._note_condemned(doomed, rescued)
        if new_root is not None:
            if new_root.fence > before.fence:
                self.report.fence = new_root.fence
            self.report.merged_segments += len(before.segments) - len(new_root.segments)

    def _condemned_since(self, condemned_at: int, root: Root) -> int:
        """Return the root that condemned a pack; one with a time in the future counts as new."""
        age = self._files.age_of(condemned_at, root)
        return root.seq + 1 if age < -_SKEW else condemned_at

    def _note_condemned(self, doomed: set[PackId], rescued: set[PackId]) -> None:
        self.report.condemned_packs += len(doomed)
        self.report.condemned_bytes += self._files.size_of(map(pack_key, doomed))
        self.report.rescued_packs += len(rescued)

    # --- free ---

    def _next_root(self, view: View, condemned: dict[bytes, int], lost: bytes) -> Root | None:
        """Return a root without the packs whose grace is over; None if none is to be put.

        Args:
            view: The view of the root that it is to follow.
            condemned: What it is to condemn, before it frees some of that.
            lost: What it is to list as lost.
        """
        root = view.root
        unnamed = self._files.unnamed(view)
        fence = max(root.fence, self._grace_allows(root, unnamed.values()))
        going, orphans = _freed_by(fence, condemned, unnamed)
        if going or orphans:
            # Takes under way that say on which root they are based are waited for.
            fence = max(root.fence, min([fence, *self._announced_bases()]))
            going, orphans = _freed_by(fence, condemned, unnamed)
        if self._options.dry_run:
            self._report_dry_run(root, going, orphans)
            return None
        self._files.add(going)
        # That of a root whose number was taken.
        rewriting, self._rewriting = self._rewriting, None
        segments = None if rewriting is None else rewriting.applied(root, going)
        if segments is None:
            if rewriting is not None:
                rewriting.discard(self._store)
            rewriting = rewrite_segments(self._store, view, going)
            segments = rewriting.applied(root, going)
        assert rewriting is not None
        assert segments is not None
        changes = {
            # For orphans below the fence of this root no other root is needed.
            "fence": fence if going or orphans else root.fence,
            "condemned": {p: seq for p, seq in condemned.items() if p not in going},
            "lost": lost,
            "segments": segments,
        }
        # After a root with a time in the future nothing would ever seem old, so put one with the
        # time of this host.
        is_ahead = root.time > time.time() + _SKEW
        if not is_ahead and all(getattr(root, name) == value for name, value in changes.items()):
            return None
        new_root = next_root(self._backend.uri, root, os.urandom(16), **changes)
        self._rewriting = rewriting
        return new_root

    def _put(self, root: Root) -> bool:
        """Put a root; return False if another commit has its number."""
        # Forget the rewriting until it is certain that no root names the segments it wrote.
        rewriting, self._rewriting = self._rewriting, None
        assert rewriting is not None
        try:
            stands = put_root(self._backend, root)
        except StorageFullError:
            rewriting.discard(self._store)
            raise
        if not stands:
            self._rewriting = rewriting
        return stands

    def _announced_bases(self) -> list[int]:
        # A process that was stopped for longer than a day is not waited for.
        return self._backend.announced_bases(max(DAY, self._grace))

    def _grace_allows(self, root: Root, unnamed: Iterable[bytes]) -> int:
        """Return the highest root number that the fence may be raised to, as far as the grace goes.

        Times only decide how long the collector waits. If they are wrong, it still deletes only
        garbage.
        """
        if self._options.condemned_until is not None:
            return min(self._options.condemned_until, root.seq)
        if self._grace == 0:
            return root.seq + 1
        bases = {base_of(ident) + 1 for ident in unnamed}
        candidates = {root.seq, *root.condemned.values(), *bases}
        seqs = sorted(seq for seq in candidates if root.fence < seq <= root.seq)
        count = bisect_left(seqs, True, key=lambda seq: self._files.age_of(seq, root) < self._grace)
        return seqs[count - 1] if count else root.fence

    def _delete_orphans(self, view: View) -> None:
        """Delete files that no root names or ever will: they were written before the fence."""
        unnamed = self._files.unnamed(view)
        orphans = _freed_by(view.root.fence, {}, unnamed)[1]
        if orphans:
            # A take that the fence has passed moves its packs, if they are still there.
            fence = min([view.root.fence, *self._announced_bases()])
            orphans = _freed_by(fence, {}, unnamed)[1]
        if orphans:
            # Another process may have put this root. It must be durable before the deletes.
            self._backend.sync(root_key(view.root.seq))
        sizes, refused = self._files.delete(orphans, self._progress)
        self._note_deleted(sizes)
        self.report.refused |= refused
        self.report.freed_bytes += sum(sizes.values())
        # At a remote place, a collection with nothing to do asks nothing.
        if orphans or not self._backend.costly_requests:
            self.report.freed_bytes += self._backend.tidy(self._grace)

    def _note_deleted(self, files: Iterable[str]) -> None:
        segments = sum(key.startswith("index/") for key in files)
        self.report.deleted_segments += segments
        self.report.deleted_packs += len(list(files)) - segments

    def _note_waiting(self, waiting: Collection[bytes], root: Root) -> None:
        self.report.waiting_packs = len(waiting)
        self.report.waiting_bytes = self._files.size_of(map(pack_key, waiting))
        if waiting:
            last = max(root.condemned.get(PackId(pack), root.seq) for pack in waiting)
            self.report.waiting_until = time.time() - self._files.age_of(last, root) + self._grace

    def _report_dry_run(
        self, root: Root, going: frozenset[PackId], orphans: dict[str, bytes]
    ) -> None:
        """Record what would be freed."""
        doomed = root.condemned.keys() | self._would_condemn
        if self._grace == 0:
            going = going.union(self._would_condemn)
        keys = [*orphans, *map(pack_key, going)]
        self._note_deleted(keys)
        self.report.freed_bytes = self._files.size_of(keys)
        self._note_waiting(doomed - going, root)


def _freed_by(
    fence: int, condemned: Mapping[bytes, int], unnamed: Mapping[str, bytes]
) -> tuple[frozenset[PackId], dict[str, bytes]]:
    """Return what a fence frees: condemned packs, and orphans by key."""
    going = frozenset(PackId(p) for p, seq in condemned.items() if seq <= fence)
    return going, {key: i for key, i in unnamed.items() if base_of(i) < fence}
