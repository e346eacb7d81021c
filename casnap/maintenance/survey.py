"""Survey a whole store: read every object, and find out what each damage hurts.

It answers three questions, each in a module of its own: which places are whole
(``pack_survey.py``), which of them the trees need (``tree_survey.py``), and which snapshots each
damage hurts (``snapshot_survey.py``). The survey trusts only the store itself, neither the cache of
this host nor hints to places.
"""

from __future__ import annotations

import random

from casnap.errors import DamagedError
from casnap.format.digest import Digest
from casnap.format.records import Place, Root, pack_key, segment_key
from casnap.maintenance.damage import ALL, Damage, Findings, Hurt
from casnap.maintenance.full_index import FullIndex
from casnap.maintenance.pack_survey import PackSurvey
from casnap.maintenance.snapshot_survey import SnapshotSurvey, copy_name
from casnap.maintenance.tree_survey import TreeSurvey
from casnap.runtime.progress import Progress
from casnap.storage import Repository
from casnap.storage.inspecting import Failure

_LOOKS = 5
_ROOT_ADVICE = (
    "It is the newest root, so nothing else can be looked at. Restore this file from a backup; "
    "never delete it, since the root before it would be taken for the newest one"
)


class Survey:
    """All damages in a store, and which entries each of them hurts.

    The constructor reads the index. :meth:`run` reads the rest. Each time another root becomes the
    newest one, all three parts begin again; only places that were read and found bad stay known.

    Args:
        store: The store.
        progress: Called with the current phase, how much of it is done, and the total.

    Raises:
        DamagedError: The newest root cannot be read.

    Attributes:
        root: The newest root.
        packs: The survey of the index and the packs.
        trees: The survey of the trees.
        snapshots: The survey of the snapshots.
    """

    root: Root
    packs: PackSurvey
    trees: TreeSurvey
    snapshots: SnapshotSurvey

    def __init__(self, store: Repository, progress: Progress | None = None) -> None:
        self.store = store
        # The one snapshot to survey; None for all.
        self._only: str | None = None
        self._reads = False
        self._progress = progress or (lambda phase, count, total: None)
        try:
            root = store.newest()
        except DamagedError as e:
            raise DamagedError(f"{e}. {_ROOT_ADVICE}") from e
        self._begin(root)

    def _begin(self, root: Root, earlier: PackSurvey | None = None) -> None:
        """Begin again with a root: read its segments.

        Args:
            root: The root.
            earlier: The survey of an earlier root. Places that it found bad stay bad.
        """
        self.root = root
        self._findings = findings = Findings()
        self.packs = PackSurvey(self.store, root, findings, self._progress, earlier)
        self.trees = TreeSurvey(self.store, root, self.packs, findings, reads=self._reads)
        self.snapshots = SnapshotSurvey(root, self.trees, findings, self._progress)

    @property
    def index(self) -> FullIndex:
        """The index, made of the segments that can be read."""
        return self.packs.index

    @property
    def damages(self) -> list[Damage]:
        """The damages found so far."""
        return self._findings.damages

    @property
    def unsupported(self) -> list[Damage]:
        """The parts that only a newer version can read. They are no damages."""
        return self._findings.unsupported

    @property
    def needed(self) -> dict[Digest, int]:
        """Digest that snapshots or the table need → the length of the chunk; -1 for a node."""
        return self.trees.needed

    def whole_places(self, digest: Digest) -> list[Place]:
        """Return the places of a chunk or node, by its digest, that are not known to be damaged."""
        return self.packs.whole_places(digest)

    def note_bad(self, digest: Digest, place: Place, failure: Failure) -> None:
        """Note that the bytes at a place are not the chunk or node with this digest."""
        self.trees.note_bad(digest, place, failure)

    def run(
        self, *, share: float | None = None, seed: int | None = None, only: str | None = None
    ) -> None:
        """Survey everything, or the tree and chunks of one snapshot.

        Args:
            share: The share of all chunks and nodes to read and verify; None to read none.
            seed: Chooses the chunks and nodes to read, if the share is less than 1.
            only: The full name of the one snapshot; None for all.
        """
        self._only = only
        if only is not None:
            self.snapshots.walk(only)
            self.packs.wanted = set(self.needed)
        else:
            self.packs.look()
        self._reads = self.trees.reads = share is not None
        if share is not None:
            self.packs.read(share, random.Random(seed))
        if only is not None:
            self.run_again()
        else:
            self._survey_snapshots()
        # Missing objects may have been collected or merged since the survey began.
        for _ in range(_LOOKS):
            if not self.damages or self.store.newest() == self.root:
                return
            self.run_again()
        self._drop_outdated()

    def run_again(self) -> None:
        """Survey the newest root, and keep the bad places that were found before."""
        self._begin(self.store.newest(), self.packs)
        self.packs.recall()
        self.packs.look()
        self._survey_snapshots()

    def _survey_snapshots(self) -> None:
        self.snapshots.walk(self._only)
        for damage in self.damages:
            if damage.digest and not damage.hurts and damage.kind != "malformed":
                if self.whole_places(Digest(bytes.fromhex(damage.digest))):
                    damage.message += "; another copy is whole"
                elif not self.trees.is_incomplete:
                    damage.message += "; nothing needs it"

    def _drop_outdated(self) -> None:
        """Drop the damages of objects and snapshots that the newest root no longer names."""
        try:
            view = self.store.view()
            commits = {n: r.commit for n, r in self.store.table(view.root).items()}
            commits |= {copy_name(c): copy.parts.digest for c, copy in view.root.copies.items()}
        except DamagedError:
            return
        keys = {pack_key(pack) for pack in view.packs}
        keys |= {segment_key(ref.id) for ref in view.root.segments}

        def is_gone(hurt: Hurt) -> bool:
            # The newest table can be read as a whole, so damages of all snapshots are outdated.
            before = self.snapshots.commits.get(hurt.snapshot)
            return hurt == ALL or (before is not None and commits.get(hurt.snapshot) != before)

        if view.root != self.root:
            self._findings.damages = [
                damage
                for damage in self.damages
                if damage.object in keys
                or (not damage.object and not (damage.hurts and all(map(is_gone, damage.hurts))))
            ]
