"""Collections, which free garbage while takes go on.

A root first *condemns* each pack that no snapshot needs. A take that began before and relies on
such a pack *rescues* it when it commits; a later take stores the pack's chunks again. After the
grace, the collector raises the *fence*: it puts a root that no longer names the pack. No take that
began before that root can commit any more. Then the collector deletes the pack
(``_Collector._delete``).

Only collectors delete packs that a root has named. A failed session deletes only its own new packs,
which no root can name. ``docs/commit-protocol.md`` has the protocol, and says why it is safe even
if clocks are wrong.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from casnap.backends.base import as_exclusive
from casnap.errors import PLACE_ERRORS, DamagedError, FencedError, StorageFullError, shell_word
from casnap.format.digest import split_digests
from casnap.format.records import PackId, Root, pack_key, root_key
from casnap.runtime.progress import Progress, ProgressCounter
from casnap.runtime.threads import Crew, run_shielded
from casnap.runtime.units import count_if_given, is_number
from casnap.storage.collecting.marks import Marks
from casnap.storage.collecting.plan import DAY, Needs, Plan, Waiting, plan_collection
from casnap.storage.collecting.recent_marks import RecentMarks
from casnap.storage.collecting.recode import Recoding, plan_recoding, recode
from casnap.storage.collecting.reference_counts import ReferenceCounts
from casnap.storage.collecting.repack import repack, sparse_packs
from casnap.storage.collecting.stored_files import StoredFiles, base_of
from casnap.storage.collecting.whole_marks import WholeMarks
from casnap.storage.commit_log.roots import next_root, put_root, release_reserve, with_advice
from casnap.storage.lookup.index import IndexView
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.abandoned_copies import drop_abandoned, without_abandoned
from casnap.storage.writing.segments import Rewriting, rewrite_segments
from casnap.storage.writing.starting_over import Obstacle, again, put_root_after

_log = logging.getLogger("casnap")


@dataclass(frozen=True, kw_only=True)
class GcOptions:
    """The options of a collection; see :meth:`casnap.Store.gc`.

    Attributes:
        grace: How many seconds to keep garbage. None for the store's setting, or else 24 hours.
        repack: A fraction from 0 to 1. If less than this fraction of a pack is needed, the needed
            part is copied to a new pack, so that the old one can be condemned.
        dry_run: Whether to only report what a collection would do.
        exclusive: Whether the user vouches that no other process writes to the store.
        deleted: For a dry run: the full names of snapshots to treat as deleted.
        condemned_until: The number of a root, or None. Packs that were condemned up to this root
            are freed, whatever the grace is.
        recode_after: How many of the newest snapshots of each folder to leave as they are. Older
            ones are recoded, if the store's settings allow it. None recodes no snapshot.
    """

    grace: float | None = None
    repack: float = 0.5
    dry_run: bool = False
    exclusive: bool = False
    deleted: frozenset[str] = frozenset()
    condemned_until: int | None = None
    recode_after: int | None = None

    def __post_init__(self) -> None:
        """Check the values of the options."""
        if not is_number(self.repack) or not 0 <= self.repack <= 1:
            raise ValueError(f"repack is a share from 0 (never) to 1; got {self.repack!r}")
        object.__setattr__(
            self, "recode_after", count_if_given("recode_after", self.recode_after, least=0)
        )
        if self.deleted and not self.dry_run:
            raise ValueError("only a dry run can treat snapshots as deleted")

    def check_allowed(self, store: Repository) -> None:
        """Check that this process may collect the garbage of a store.

        Raises:
            StoreError: Other processes may write to the store, and its place does not honour
                put-if-absent.
        """
        if not self.dry_run:
            with as_exclusive(store.backend, store.backend.exclusive or self.exclusive):
                store.check_put_if_absent()


@dataclass
class GcReport:
    """The outcome of a collection; with ``dry_run``, of its plan.

    A dry run makes the same plan as a real run, but some of its figures are only estimates:

    - It cannot tell which chunks recoding would make smaller, nor which files in ``tmp/`` are left
      over from dead writers.
    - ``copied_bytes`` also counts needed chunks that another pack has, and that a real run would
      therefore not copy.
    - A real run puts roots and segments for its copies. So it may raise the fence further, and may
      free more bytes.

    Attributes:
        dry_run: Whether the collection only planned, and changed nothing.
        snapshots: How many snapshots were marked. A witness counts as one.
        live_chunks: How many different chunks and tree nodes these snapshots need.
        live_bytes: The stored bytes of these chunks and nodes.
        condemned_packs: How many packs were condemned, since no snapshot needs them.
        condemned_bytes: The bytes of these packs.
        rescued_packs: How many condemned packs are needed again, and are no longer condemned.
        repacked_packs: How many mostly dead packs had their needed part copied to new packs.
        copied_bytes: The bytes that were copied.
        recoded_snapshots: How many older snapshots were recoded.
        recoded_chunks: How many of their chunks have a smaller form now.
        saved_bytes: How many bytes less the recoded chunks take up now.
        merged_segments: How many segments fewer the index has after merging.
        fence: The number of the root that the fence was raised to; None if it was not raised.
        deleted_packs: How many packs were deleted.
        deleted_segments: How many segments of the index were deleted.
        freed_bytes: The bytes of all files that were deleted.
        waiting_packs: How many condemned packs wait for the end of their grace.
        waiting_bytes: The bytes of these packs.
        waiting_until: When the grace of the last waiting pack is over, in seconds since the epoch.
        lost_chunks: How many chunks are lost, as a repair has found, though snapshots need them.
        refused: Garbage files that this user may not delete → the reason. They belong to other
            users, in a sticky folder. Their owners' collections delete them.
        warnings: Rules of the bucket that can hurt the store, or keep what was deleted.
        seconds: How long the collection took.
        processor_seconds: The processor time of the collection, without the threads that copy and
            delete.
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
    report: GcReport | None = None,
) -> GcReport:
    """Collect the garbage of a store.

    Args:
        store: The store.
        options: The options.
        progress: Called with the current phase, how much of it is done, and the total.
        counts: The counts of an earlier collection of this process. The collection then looks only
            at packs that are new, or hold chunks that are no longer needed. If the counts are
            empty, the collection looks at all packs, and fills the counts.
        report: An empty report to fill in, for a caller that needs it even if the collection fails.

    Raises:
        StoreError: This process may not write to the store, or not beside other writers.
        DamagedError: Something could not be read; the message says how to continue.
    """
    started = time.monotonic()
    options.check_allowed(store)
    report = GcReport() if report is None else report
    report.dry_run = options.dry_run

    def work(crew: Crew) -> None:
        def tell(what: str, done: int, total: int) -> None:
            if crew.error is not None:
                # Interrupted: keep what was collected so far.
                raise crew.error
            if progress is not None:
                progress(what, done, total)

        try:
            _Collector(store, options, tell, report, counts).run()
        except StorageFullError as e:
            raise with_advice(e, store.recent()) from e
        except DamagedError as e:
            raise DamagedError(e.what, e.paths, _advice(store, report)) from e

    with as_exclusive(store.backend, store.backend.exclusive or options.exclusive):
        run_shielded(work)
    if report.freed_bytes:
        with suppress(*PLACE_ERRORS):
            report.warnings = store.backend.bucket_warnings()
    report.seconds = time.monotonic() - started
    return report


def _advice(store: Repository, report: GcReport) -> str:
    done = "No more was deleted" if report.freed_bytes else "Nothing was deleted"
    uri = shell_word(store.backend.uri)
    return (
        f"{done}. `casnap check {uri}` says what is hurt, `casnap repair {uri}` saves what can be "
        "saved (--yes in a script); if something stays lost, `casnap rm` of the snapshots "
        "that they name, or `casnap repair --from` with a copy, lets gc continue"
    )


class _Candidates:
    """The packs that a collection wants to condemn, unless newer roots need them.

    Args:
        marks: Which chunks and nodes are needed.
        needs: Which packs of the marked root are dead, sparse or needed.
        copied_to: The digest of each needed chunk or node of the sparse packs → another pack that
            holds it.
    """

    def __init__(self, marks: Marks, needs: Needs, copied_to: Mapping[bytes, PackId]) -> None:
        self._marks = marks
        self._needs = needs
        self._copied_to = copied_to
        self._doomed = needs.dead.union(needs.sparse)
        # Digest → the doomed packs that hold it; and which of these digests are needed.
        self._contents: dict[bytes, list[PackId]] | None = None
        self._required: set[bytes] = set()

    def at(self, view: IndexView) -> Needs:
        """Return the packs that the next root may condemn, and those that it must rescue.

        A pack may be condemned if the newest root needs nothing in it, or if all that is needed was
        copied to packs that are live in the newest root.

        Args:
            view: The index according to the newest root.

        Raises:
            DamagedError: A node that the newest root needs cannot be read.
        """
        marks, root = self._marks, view.root
        fresh = marks.advance(root) if root != marks.root else set()
        self._doomed = frozenset(pack for pack in self._doomed if pack in view.live)
        if self._contents is None and (self._needs.sparse or fresh):
            self._contents = {}
            for digest, pack, _ in marks.contents_of(self._doomed):
                self._contents.setdefault(digest, []).append(pack)
            self._required = set(marks.needed_of(set(self._contents)))
        contents = self._contents or {}
        self._required |= fresh & contents.keys()
        for digest in self._required:
            # A copy that another collector has condemned since then does not count.
            elsewhere = self._copied_to.get(digest)
            if elsewhere not in view.live or elsewhere in self._doomed:
                self._doomed = self._doomed.difference(contents[digest])
        sparse = {p: nbytes for p, nbytes in self._needs.sparse.items() if p in self._doomed}
        return replace(self._needs, dead=self._doomed.difference(sparse), sparse=sparse)


class _Collector:
    def __init__(
        self,
        store: Repository,
        options: GcOptions,
        progress: Progress,
        report: GcReport,
        counts: ReferenceCounts | None = None,
    ) -> None:
        self._store = store
        self._counts = counts
        self._is_whole = counts is None
        self._backend = store.backend
        self._options = options
        self._grace = DAY
        self._what = f"{store.backend.uri}: the collection"
        self._progress = progress
        self._files: StoredFiles
        self._rewriting: Rewriting | None = None
        self._lacks_space = False
        self.report = report

    def run(self) -> None:
        began = time.thread_time()
        try:
            self._run()
        except BaseException:
            # The counts may be incomplete.
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
                "%s: no space is left to copy needed chunks out of mostly dead packs, so these "
                "packs stay; free some space, or wait until the grace of condemned packs is over, "
                "and run gc again",
                self._backend.uri,
            )

    def _use_reserve(self, _error: StorageFullError) -> None:
        release_reserve(self._backend)
        self._options = replace(self._options, repack=0)
        if self._counts is not None:
            # Then all packs are listed again: most of the garbage may be packs of dead takes.
            self._counts.clear()

    def _recode(self, root: Root) -> None:
        after = self._options.recode_after
        if after is None or not self._store.settings(root).recodes:
            return

        def give_up(error: Obstacle) -> None:
            # Snapshots that were recoded by then stay so. If the disk is full, this collection may
            # make room for the others.
            self._lacks_space = isinstance(error, StorageFullError)

        def recode_at(root: Root) -> Recoding:
            todo = plan_recoding(self._store, root, after, self._options.deleted)
            if self._options.dry_run:
                return Recoding(len(todo.snapshots))
            return recode(self._store, todo, self._progress)

        # If another collector moves packs that are read here, recoding begins again. Snapshots that
        # were recoded stay so.
        recoding: Recoding | None = again(
            self._store,
            lambda: self._store.read_at_newest(recode_at, lambda: root),
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
        # This holds for all tries: the first one may complete the counts, and then be fenced.
        self._is_whole = self._counts is None or not self._counts.is_known
        # Another collector may be faster, and delete the copies of this one.
        plan, root = again(
            self._store,
            lambda: self._store.read_at_newest(self._plan_and_carry_out, self._first_root),
            self._what,
            tries=None,
        )
        self._note(plan)
        if self._options.dry_run:
            self._note_deleted(plan.deleted)
            self.report.copied_bytes = sum(plan.copied.values())
            self.report.freed_bytes = self._files.size_of(plan.deleted)
        else:
            self._delete(plan.deleted, root)

    def _first_root(self) -> Root:
        root = self._store.recent()
        if self._options.dry_run:
            # Files are listed before the root is read, or packs that a take commits in between
            # would look like orphans. Any other run notices such a commit when it puts a root.
            self._files = StoredFiles(self._store, root)
            root = self._store.newest()
        return root

    def _plan_and_carry_out(self, root: Root) -> tuple[Plan, Root]:
        """Plan a collection for a root, and carry out the plan until its root is durable.

        Deleting the freed files is left to the caller.

        Returns:
            The last plan, and the root that carries it out. A plan that needs no new root is
            returned with the root that it was made for.
        """
        if self._rewriting is not None:
            # A try that was fenced has left segments, which would be taken for orphans.
            self._rewriting.discard(self._store)
            self._rewriting = None
        view = self._store.index.view(root)
        marks = self._marks(view)
        self._check_missing(marks)
        report = self.report
        report.snapshots, report.live_chunks = marks.snapshots, marks.count
        report.live_bytes = marks.nbytes
        if not self._options.dry_run:
            self._files = StoredFiles(self._store, root, lists_packs=marks.finds_orphans)
        needs = Needs(
            dead=frozenset(p for p, use in marks.uses.items() if not use.needed and p in view.live),
            sparse=sparse_packs(marks, view, self._options.repack),
            rescued=frozenset(marks.rescue),
            found=frozenset(split_digests(root.lost)) - marks.missing,
        )
        plan = self._plan(view, needs)
        if self._options.dry_run:
            return plan, root
        # Orphans that an earlier run has left go first. To delete them takes no space, and may free
        # enough for the copies.
        took_long = self._delete(plan.orphans, root)
        copied_to = self._copy_out(marks, plan) if plan.copied else {}
        took_long = took_long or bool(plan.copied)
        try:
            done = self._put_root_of(plan, _Candidates(marks, needs, copied_to), took_long)
        except DamagedError as e:
            newest = self._store.newest()
            if marks.root == root or set(marks.root.segments) <= set(newest.segments):
                raise
            # Another collector has moved packs that were read for a root after the one at hand.
            raise FencedError(e.what) from e
        if not self._lacks_space:
            # Otherwise the next collection looks again at the packs that were not copied.
            marks.note_done()
        return done

    def _marks(self, view: IndexView) -> Marks:
        if self._counts is not None and self._counts.is_known and not self._is_whole:
            try:
                return RecentMarks(self._store, view, self._counts, self._progress)
            except DamagedError as e:
                # Nodes that went out of use were collected before this process discounted them.
                _log.debug("%s: all is counted anew: %s", self._backend.uri, e)
        self._is_whole = True
        if self._counts is not None:
            self._counts.clear()
        # Any run but a dry one has dropped abandoned copies. The copies that are left are needed.
        root = without_abandoned(view.root) if self._options.dry_run else view.root
        return WholeMarks(self._store, root, self._progress, self._options.deleted, self._counts)

    def _check_missing(self, marks: Marks) -> None:
        unknown = marks.missing.difference(split_digests(marks.root.lost))
        self.report.lost_chunks = len(marks.missing) - len(unknown)
        if unknown:
            raise DamagedError(
                f"{self._backend.uri}: {len(unknown):,} chunks that snapshots need are in no pack, "
                f"such as {min(unknown).hex()}"
            )

    def _plan(self, view: IndexView, needs: Needs) -> Plan:
        waiting = Waiting(
            grace=self._grace,
            condemned_until=self._options.condemned_until,
            age_of=lambda seq: self._files.age_of(seq, view.root),
            announced_bases=self._announced_bases,
        )
        unnamed, costs = self._files.unnamed(view), self._backend.costs
        return plan_collection(view, needs, unnamed, waiting, costs, self._rewriting)

    def _announced_bases(self) -> list[int]:
        # A take that was announced longer ago than the grace, or a day, is not waited for.
        return self._backend.announced_bases(max(DAY, self._grace))

    # --- carrying out the plan ---

    def _copy_out(self, marks: Marks, plan: Plan) -> dict[bytes, PackId]:
        """Copy all needed chunks and nodes in the packs of ``plan.copied`` to new packs.

        Returns:
            The digest of each needed chunk or node → a pack that now holds it.
        """
        copied_to: dict[bytes, PackId] = {}
        counter = ProgressCounter(self._progress, "copying", sum(plan.copied.values()))
        try:
            for copies in repack(self._store, marks, plan.view, plan.copied, counter.add):
                copied_to |= copies
        except StorageFullError:
            # Packs that are wholly dead can still be condemned.
            self._lacks_space = True
        finally:
            self.report.copied_bytes += counter.done
        # The copies came with new segments. List the files anew, since these may be merged away.
        root = self._store.recent()
        self._files = StoredFiles(self._store, root, lists_packs=marks.finds_orphans)
        return copied_to

    def _put_root_of(self, plan: Plan, candidates: _Candidates, is_old: bool) -> tuple[Plan, Root]:
        """Put the root of a plan.

        If others have committed meanwhile, make a new plan and put its root.

        Args:
            plan: The plan.
            candidates: The packs that a new plan may condemn.
            is_old: Whether ``plan`` was made long ago. Takes may have announced themselves since,
                so a new plan is made in any case.

        Returns:
            The plan that was carried out, and the root that carries it out. A plan that needs no
            new root is returned with the root that it was made for.
        """

        def prepare(root: Root) -> Root | None:
            nonlocal plan
            if is_old or root != plan.view.root:
                view = self._store.index.view(root)
                plan = self._plan(view, candidates.at(view))
            return self._next_root(plan)

        root = put_root_after(self._store, prepare, self._put)
        return plan, root or plan.view.root

    def _next_root(self, plan: Plan) -> Root | None:
        """Write the segments of a plan, and return its root; None if the plan puts no root."""
        root = plan.view.root
        self._files.add(plan.freed)
        # There may be a rewriting for a root whose number was taken.
        rewriting, self._rewriting = self._rewriting, None
        if rewriting is not None and not rewriting.fits(root, plan.freed):
            rewriting.discard(self._store)
            rewriting = None
        if not plan.changes_root:
            return None
        if rewriting is None:
            rewriting = rewrite_segments(self._store, plan.view, plan.rewritten, plan.freed)
        self._rewriting = rewriting
        return next_root(
            self._backend.uri,
            root,
            os.urandom(16),
            fence=plan.fence,
            condemned=dict(plan.waiting),
            lost=plan.lost,
            segments=rewriting.applied(root),
        )

    def _put(self, root: Root) -> bool:
        """Put a root. Return False if another commit has taken its number."""
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

    def _delete(self, files: Mapping[str, bytes], root: Root) -> bool:
        """Delete packs and segments that no root can name any more; then tidy ``tmp/``.

        A file is deleted only if it was written under a root before the fence, and before the root
        of each announced take. The segments that the newest root names stay.

        Args:
            files: The key of each file → the id of the pack or segment.
            root: The newest root, which has the fence.

        Returns:
            Whether there were any packs or segments to delete.
        """
        named = {ref.id for ref in root.segments}
        passed = {
            key: ident
            for key, ident in files.items()
            if base_of(ident) < root.fence and ident in self._files and ident not in named
        }
        if passed:
            # An announced take that the fence has passed may still move its packs: they stay.
            least = min([root.fence, *self._announced_bases()])
            passed = {key: ident for key, ident in passed.items() if base_of(ident) < least}
        if passed:
            # Another process may have put this root. It must be durable before the deletes.
            self._backend.sync(root_key(root.seq))
        sizes, refused = self._files.delete(passed, self._progress)
        self._note_deleted(sizes)
        self.report.refused |= refused
        self.report.freed_bytes += sum(sizes.values())
        # At a remote place, a collection that deletes nothing spares this request too.
        if passed or self._backend.costs.free_looks:
            self.report.freed_bytes += self._backend.tidy(self._grace)
        return bool(passed)

    # --- the report ---

    def _note(self, plan: Plan) -> None:
        report, root = self.report, plan.view.root
        report.condemned_packs += len(plan.condemned)
        report.condemned_bytes += self._files.size_of(map(pack_key, plan.condemned))
        report.repacked_packs += len(plan.copied)
        report.rescued_packs += len(plan.rescued)
        report.merged_segments += plan.merged_segments
        if plan.fence > root.fence:
            report.fence = plan.fence
        report.waiting_packs = len(plan.waiting)
        report.waiting_bytes = self._files.size_of(map(pack_key, plan.waiting))
        report.waiting_until = None
        if plan.waiting:
            newest = max(plan.waiting.values())
            # Packs that are condemned now have the number of the next root, which is just put.
            age = 0.0 if newest > root.seq else self._files.age_of(newest, root)
            report.waiting_until = time.time() - age + self._grace

    def _note_deleted(self, files: Collection[str]) -> None:
        segments = sum(key.startswith("index/") for key in files)
        self.report.deleted_segments += segments
        self.report.deleted_packs += len(files) - segments
