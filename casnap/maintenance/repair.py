"""Repair a damaged store: save all data that are still whole.

A repair changes nothing in place and deletes nothing. It writes packs and segments of whole data,
and puts a root that names them instead of the damaged ones. So it can be killed at any moment,
repeated, and run beside takes. A take that relied on a damaged pack starts again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from casnap.backends import Backend
from casnap.errors import (
    BackendError,
    CasnapError,
    DamagedError,
    NotAStoreError,
    UnsupportedFormatError,
)
from casnap.format.digest import Digest
from casnap.format.records import (
    PackId,
    Place,
    Record,
    Root,
    pack_key,
)
from casnap.maintenance.check import lost_commits
from casnap.maintenance.config_repair import check_config, config_damages, restore_config
from casnap.maintenance.damage import Damage, root_damages
from casnap.maintenance.pack_checks import bad_records, can_lie_at, is_known
from casnap.maintenance.survey import Survey
from casnap.runtime.progress import Progress
from casnap.storage import Changes, Location, ReadOptions, Repository, Want
from casnap.storage.inspecting import Mending, Reason, StoredFiles, read_footer

# One reader: packs are filled from one thread, out of the other buffers of the pool.
_READ = ReadOptions(readers=1)
# How often a repair starts over, at most, because a collector has changed the store.
_MOST_TRIES = 10


@dataclass
class RepairReport:
    """The outcome of a repair; with ``dry_run``, what a repair would do.

    Attributes:
        dry_run: Whether nothing was changed.
        found: The damages.
        remaining: The damages that could not be repaired, with everything that they hurt. With
            ``dry_run`` also damages that may turn out to hurt something once the index and the
            trees can be read again.
        root: The number of the newest root.
        dropped_segments: Index segments that could not be read.
        adopted_packs: Packs that no segment listed, and that are listed again.
        replaced_packs: Damaged packs whose whole chunks were copied.
        saved_chunks: How many chunks and nodes were copied out of damaged packs.
        healed_chunks: How many lost chunks and nodes were found in a source.
        rescued_packs: Condemned packs that are needed, and are no longer condemned.
        restored_root: The number of the older root whose snapshots the store has again; None unless
            files that the newest root named are missing, and its table of snapshots cannot be read.
        skipped: Sources that could not be used, and why; also packs that no segment lists.
        warnings: If an older root is restored, what the newer roots had. Also snapshots that
            markers name, but the newest root does not, as in a check. No repair can bring either
            back.
    """

    dry_run: bool = False
    found: list[Damage] = field(default_factory=list)
    remaining: list[Damage] = field(default_factory=list)
    root: int = -1
    dropped_segments: int = 0
    adopted_packs: int = 0
    replaced_packs: int = 0
    saved_chunks: int = 0
    healed_chunks: int = 0
    rescued_packs: int = 0
    restored_root: int | None = None
    skipped: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no damage remains."""
        return not self.remaining


def repair(
    store: Repository,
    *,
    sources: Sequence[str | os.PathLike[str] | Backend] = (),
    progress: Progress | None = None,
    dry_run: bool = False,
) -> RepairReport:
    """Repair a store. Takes may run at the same time.

    Args:
        store: The store.
        sources: Other stores, in which to look for lost chunks.
        progress: Called with the current phase, how much of it is done, and the total.
        dry_run: Change nothing.

    Raises:
        DamagedError: The newest root cannot be read.
        BackendError: Something cannot be read now, but may be whole.
        UnsupportedFormatError: A damaged pack holds chunks in a form that this version does not
            know.
    """
    return Mending.run(
        store, lambda mending: _Repair(store, sources, dry_run, mending).run(progress)
    )


class _Repair:
    def __init__(
        self,
        store: Repository,
        sources: Sequence[str | os.PathLike[str] | Backend],
        dry_run: bool,
        mending: Mending,
    ) -> None:
        self._store = store
        self._sources = sources
        self._mending = mending
        self._copied: set[Digest] = set()
        self._healed: set[Digest] = set()
        self._would_adopt: set[Digest] = set()
        # Damaged roots, which must not stay the newest.
        self._must_replace: set[int] = set()
        # The newest whole root, if files that the newest root names are missing.
        self._whole_root: Root | None = None
        # The newest root as the repair found it.
        self._found_root = -1
        self._tries = 0
        self.report = RepairReport(dry_run=dry_run)

    def run(self, progress: Progress | None) -> RepairReport:
        self._survey = survey = Survey(self._store, progress)
        self._store.check_writable("repair", dry_run=self.report.dry_run)
        check_config(self._store, survey.root)
        survey.run(share=1.0)
        self._refuse_unreadable()
        stood_in_for, history = root_damages(self._store.backend, survey.root.seq)
        record = config_damages(self._store, survey.root)
        self.report.found = [*record, *history, *stood_in_for, *survey.damages]
        if record and not self.report.dry_run:
            restore_config(self._store.backend, self._store.config)
        self._must_replace = {survey.root.seq} if stood_in_for else set()
        self._found_root = survey.root.seq
        if survey.damages:
            older = self._store.as_of_whole_root()
            self._whole_root = None if older is None else older.newest()
        if self.report.dry_run:
            self._adopt()
            self._mend()
            self._go_back()
        else:
            while self._change():
                survey.run_again()
                self._refuse_unreadable()
            self.report.remaining = survey.damages
        self.report.root = survey.root.seq
        if not survey.damages:
            self.report.warnings += lost_commits(self._store)
        return self.report

    def _change(self) -> bool:
        """Make the next repair, if one is needed; return whether to survey the store again."""
        try:
            return self._drop_rows() or self._adopt() or self._mend() or self._go_back()
        except DamagedError:
            # A collector may have deleted segments that the surveyed root names, and the newest
            # does not.
            self._tries += 1
            if self._tries == _MOST_TRIES or self._store.newest() == self._survey.root:
                raise
            self._drop_saved()
            return True

    def _drop_rows(self) -> bool:
        """Remove the rows of the table whose names cannot be names of snapshots."""
        names = self._survey.snapshots.rejected
        return bool(names) and Changes(self._store).commit(lambda *_: dict.fromkeys(names))

    def _refuse_unreadable(self) -> None:
        """Raise an error if an object cannot be read now: it may be whole."""
        for damage in self._survey.damages:
            if damage.kind == "unreadable":
                raise self._unreadable(damage.object, damage.message)

    def _unreadable(self, key: str, reason: str) -> BackendError:
        return BackendError(
            f"{self._store.backend.where(key)}: {reason}; it may be whole, so it is not given up."
            " Make it readable, then repair again. If its disk is broken, put the part of it that "
            "can be read in its place, or delete it"
        )

    def _drop_saved(self) -> None:
        self._mending.drop()
        self._copied, self._healed = set(), set()

    def _go_back(self) -> bool:
        """If the table of snapshots is lost, put a root with the snapshots of an older, whole root.

        Returns:
            Whether to survey the store again.
        """
        survey, whole, index = self._survey, self._whole_root, self._survey.index
        if whole is None or not survey.snapshots.table_is_lost:
            return False
        # A dry run does not know whether the table could be read with the packs and chunks found
        # elsewhere.
        if self.report.dry_run and (self._would_adopt or self._healed):
            return False
        if self.report.dry_run:
            self.report.remaining = []
        elif not self._mending.go_back(survey.root, whole, index.packs, index.of_pack):
            return True
        self.report.restored_root, self._whole_root = whole.seq, None
        self.report.warnings.append(
            f"the snapshots, tags and deletions that roots {whole.seq + 1} to {self._found_root} "
            "added are given up. Their names are not known, since no table lists them: look "
            "whether the last snapshots of your runs are there"
        )
        return True

    # --- packs that no segment lists ---

    def _adopt(self) -> bool:
        """List packs again that no readable segment lists, if they hold a lost chunk or node.

        Returns:
            Whether any pack was listed again.
        """
        survey = self._survey
        if not survey.packs.unreadable and not survey.trees.lost:
            return False
        packs = {pack: records for pack, records in self._orphans() if records}
        if not packs:
            return False
        if self.report.dry_run:
            self._would_adopt = {digest for records in packs.values() for digest, _ in records}
        else:
            self._mending.adopt(packs, survey.packs.unreadable)
            self.report.dropped_segments += len(survey.packs.unreadable)
        self.report.adopted_packs += len(packs)
        return True

    def _orphans(self) -> Iterator[tuple[PackId, list[Record]]]:
        """Yield the packs that should be listed again, each with its whole records."""
        survey = self._survey
        files = StoredFiles(self._store, survey.root)
        for ident in sorted(files.packs - set(survey.index.packs)):
            pack = PackId(ident)
            footer = self._footer(pack)
            useful = {d for d, _ in footer if not survey.whole_places(d)}
            if not survey.packs.unreadable:
                useful &= survey.trees.lost
            if not useful:
                continue
            bad = set()
            for record, failure in bad_records(self._store, footer, lambda n: None):
                if failure.reason is Reason.UNREADABLE:
                    raise self._unreadable(pack_key(pack), str(failure))
                bad.add(record)
            records = [record for record in footer if record not in bad]
            if useful.intersection(digest for digest, _ in records):
                yield pack, records

    def _footer(self, pack: PackId) -> list[Record]:
        backend = self._store.backend
        try:
            size = backend.size(pack_key(pack))
            footer = read_footer(backend, pack, size)
        except FileNotFoundError:  # a collector has deleted it
            return []
        except (DamagedError, BackendError) as e:
            if self._survey.packs.unreadable:
                self._skip(f"{pack_key(pack)} is in no segment: {e}")
            return []
        return [(d, p) for d, p in footer if can_lie_at(p) and p.offset + p.stored_size <= size]

    # --- damaged packs, and what is lost ---

    def _mend(self) -> bool:
        """Put a root without damaged packs and segments; return whether to survey again."""
        survey, root = self._survey, self._survey.root
        damaged = frozenset(survey.packs.hurt)
        if not self._save(damaged):
            return True
        self._heal()
        lost_digests = self._lost_digests() - self._copied
        released = survey.trees.rescued | damaged
        condemned = {p: c for p, c in root.condemned.items() if p not in released}
        lost = b"".join(sorted(lost_digests))
        if self.report.dry_run:
            self._report_dry_run(lost_digests - self._would_adopt)
            self._count(damaged)
            return False
        has_saved = self._mending.has_saved
        news = has_saved or damaged or survey.packs.unreadable or root.seq in self._must_replace
        if not news and (root.condemned, root.lost) == (condemned, lost):
            return False
        if self._mending.replace(
            root, damaged, survey.packs.unreadable, condemned=condemned, lost=lost
        ):
            self._count(damaged)
        if not self._mending.has_saved:
            self._drop_saved()
        return True

    def _report_dry_run(self, digests: set[Digest]) -> None:
        """Report the damages that a repair would leave.

        These are the damages of lost digests. If not all needed digests are known, the damages of
        packs are among them.

        Args:
            digests: The digests that the repair would not find.
        """
        survey = self._survey
        damages = [
            d for digest in survey.trees.lost & digests for d in survey.trees.damages_of(digest)
        ]
        if survey.trees.is_incomplete:
            packs = [d for d in survey.damages if d.object.startswith("packs/")]
            damages += [d for d in packs if d.digest or d.kind in ("missing", "cut off")]
        self.report.remaining = list(dict.fromkeys(damages))

    def _count(self, damaged: frozenset[PackId]) -> None:
        report, survey = self.report, self._survey
        report.dropped_segments += len(survey.packs.unreadable)
        report.replaced_packs += len(damaged)
        report.rescued_packs += len(survey.trees.rescued - damaged)
        report.saved_chunks += len(self._copied - self._healed)
        report.healed_chunks += len(self._healed)

    def _lost_digests(self) -> set[Digest]:
        survey = self._survey
        digests = set(survey.trees.lost)
        if survey.trees.is_incomplete:
            # The digests below a lost node are not known, so digests that were lost stay lost.
            digests.update(d for d in survey.trees.known_lost if not survey.whole_places(d))
        return digests

    def _save(self, damaged: frozenset[PackId]) -> bool:
        """Copy the whole chunks and nodes of damaged packs, unless another pack holds them whole.

        Args:
            damaged: The damaged packs.

        Returns:
            Whether all that had to be copied were still whole.
        """
        survey, all_whole = self._survey, True
        safe = set(survey.index.packs) - survey.root.condemned.keys() - damaged
        for pack in sorted(damaged):
            places_to_read = []
            for digest, place in survey.index.of_pack(pack):
                places = survey.whole_places(digest)
                if place in places and not any(p.pack in safe and is_known(p) for p in places):
                    if not is_known(place):
                        raise self._unsupported(pack)
                    places_to_read.append(
                        (place, [Want(digest, -1, partial(self._keep, digest), "")])
                    )
            if self.report.dry_run:
                self._copied.update(wants[0].digest for _, wants in places_to_read)
                continue
            for place, wants, failure in self._store.read_places(places_to_read, _READ):
                if failure.reason is Reason.UNSUPPORTED:
                    raise self._unsupported(pack)
                survey.note_bad(wants[0].digest, place, failure)
                all_whole = False
        return all_whole

    def _unsupported(self, pack: PackId) -> UnsupportedFormatError:
        return UnsupportedFormatError(
            f"{self._store.backend.where(pack_key(pack))} is damaged, and some chunks to be saved "
            "from it have a form that this casnap does not know; nothing was given up. Update "
            "casnap, then repair again"
        )

    def _keep(self, digest: Digest, raw: memoryview) -> None:
        """Write a verified chunk or node to a new pack, unless the repair has already done so."""
        if digest in self._copied:
            return
        self._copied.add(digest)
        if self.report.dry_run:
            return
        survey = self._survey
        if not self._mending.has_saved:
            records = (r for pack in survey.packs.hurt for r in survey.index.of_pack(pack))
            self._mending.begin(survey.root, (place for _, place in records))
        self._mending.save(digest, raw, is_node=survey.needed.get(digest) == -1)

    # --- sources ---

    def _heal(self) -> None:
        """Look for lost chunks and nodes in the cache and in the sources."""
        for digest in self._still_lost():
            node = self._store.cached_node(digest)
            if node is not None:
                self._heal_one(digest, memoryview(node))
        for source in self._sources:
            name = source.uri if isinstance(source, Backend) else os.fspath(source)
            try:
                place = source if isinstance(source, Backend) else _store_at(name)
                self._heal_from(Repository(place))
            except CasnapError as e:
                self._skip(f"{name}: {e}")

    def _still_lost(self) -> set[Digest]:
        return self._lost_digests() - self._copied - self._would_adopt

    def _heal_one(self, digest: Digest, raw: memoryview) -> None:
        self._keep(digest, raw)
        self._healed.add(digest)

    def _heal_from(self, source: Repository) -> None:
        places = Survey(source).index
        places_to_read: list[tuple[Place, list[Want]]] = []
        for digest in self._still_lost():
            want = Want(digest, -1, partial(self._heal_one, digest), "")
            places_to_read += [(p, [want]) for p in places.of(digest) if can_lie_at(p)]
        source.read_places(places_to_read, _READ)

    def _skip(self, reason: str) -> None:
        if reason not in self.report.skipped:
            self.report.skipped.append(reason)


def _store_at(source: str) -> Backend:
    location = Location.of_store(source, may_take=False)
    if location.backend.folder and not location.exists:
        raise NotAStoreError(
            "it is no casnap store. Take or import the tensors of a file into the damaged store: "
            "that heals the chunks that it has"
        )
    return location.backend
