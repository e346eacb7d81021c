"""Witnesses: digests of a state at a step, to check that a later run has the same state there.

A witness is stored as a small snapshot, of some kB. A note in its row says that it is a witness, so
lists of snapshots leave it out (``docs/decisions/0104-witnesses.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from casnap.comparing.witness_report import WitnessReport, first_of_each_role
from casnap.errors import DamagedError, SnapshotExistsError
from casnap.format.records import REWOUND, WITNESS, decode, encode
from casnap.ranks.comm import Comm, SingleProcess
from casnap.restore.read_object import read_object
from casnap.runtime.threads import python_gc_paused
from casnap.state.roles import role_of_form
from casnap.state.run_environment import changes_since
from casnap.state.stateful import StateDict
from casnap.storage import Contents, Repository, Table
from casnap.take.capture import LiveState, StateSource
from casnap.take.comparison import digests_of, manifest_of
from casnap.take.manifest import PATH_DIGEST_SIZE, PathDigest
from casnap.take.options import TakeOptions
from casnap.take.take import take

_KEY = "witness"


def witness(
    store: Repository,
    name: str,
    source: StateSource,
    options: TakeOptions,
    comm: Comm,
    find: Callable[[], tuple[Contents | None, str | None]],
) -> WitnessReport:
    """Store the digests of a state, or compare it with those that are stored. All ranks call this.

    Args:
        store: The store.
        name: The full name that the user gave.
        source: The state of this rank.
        options: How to take it.
        comm: The ranks.
        find: Returns the stored witness of this name, or None; and the commit id, in hex, of the
            snapshot that a new witness would follow: "" if there is none, None if it is gone. Only
            rank 0 calls this function.

    Raises:
        StateError: Something in the state cannot be taken.
        SnapshotExistsError: A snapshot has the name that the witness gets.
        DamagedError: The witness is damaged.
        StoreError: The store cannot be used.
        RankError: Another rank failed, died or hangs.
    """
    comm.enter_phase("hashing a witness")
    hashing = replace(options, overwrite=True)
    with python_gc_paused():
        digests = digests_of(store, Table.witness_name(name), source, hashing, comm)
        found = _Table.of(digests, comm.size)
        del digests
    comm.enter_phase("storing or comparing a witness")
    report = None
    if comm.rank == 0:
        there, follows = find()
        if there is not None:
            report = _compared(name, there, found)
        elif follows is None:
            report = WitnessReport(name, not_compared="the snapshot that it follows is gone")
        else:
            _store(store, name, found, options, follows)
            report = WitnessReport(name, stored=True)
    return comm.broadcast_message(report, WitnessReport)


class _Table(NamedTuple):
    """The content of a witness.

    Attributes:
        paths: The sorted paths, each with the form of its entry: a number that, with the path,
            gives the role. Encoded in msgpack; the witnesses of a run share this chunk.
        digests: The digests of the entries, joined, in the order of the paths.
        ranks: The number of ranks that had the state.
    """

    paths: bytes
    digests: bytes
    ranks: int

    @classmethod
    def of(cls, found: Sequence[PathDigest], ranks: int) -> _Table:
        paths = encode([(path, form) for path, form, _ in found])
        return cls(paths, b"".join([digest for _, _, digest in found]), ranks)

    def source(self) -> StateSource:
        """Return the app state as which the witness is stored."""
        return LiveState({_KEY: StateDict(self._asdict())})

    @classmethod
    def read(cls, there: Contents) -> _Table:
        """Read a witness.

        Raises:
            DamagedError: The snapshot is damaged, or is no witness.
        """
        try:
            state = read_object(there, _KEY)
            return cls(bytes(state["paths"]), bytes(state["digests"]), int(state["ranks"]))
        except (KeyError, TypeError, ValueError) as e:
            raise DamagedError(f"{there.label} is no witness: {e}") from e

    def by_path(self, label: str) -> dict[str, tuple[int, bytes]]:
        """Return path → the form of its entry, and the digest of the entry.

        Raises:
            DamagedError: The number of digests is not that of the paths.
        """
        paths = decode(self.paths, list[tuple[str, int]], f"the paths of {label}")
        size, digests = PATH_DIGEST_SIZE, self.digests
        if len(digests) != size * len(paths):
            raise DamagedError(
                f"{label} has {len(digests)} bytes of digests for {len(paths)} paths"
            )
        parts = (digests[at : at + size] for at in range(0, len(digests), size))
        return {path: (form, part) for (path, form), part in zip(paths, parts, strict=True)}


def _store(store: Repository, name: str, found: _Table, options: TakeOptions, follows: str) -> None:
    """Store a witness.

    Args:
        store: The store.
        name: The full name that the user gave.
        found: What to store.
        options: How the state was taken.
        follows: The commit id of the snapshot that it follows, in hex.
    """
    hooks = options.hooks

    def notes(_: str) -> dict[str, Any]:
        # For the mirror, it belongs to the run of the name that was given.
        return {**hooks.notes(name), REWOUND: True, WITNESS: follows}

    alone = TakeOptions(
        threads=options.threads,
        environment=options.environment,
        # What collections have freed is told by the next take of a snapshot.
        hooks=replace(hooks, notes=notes, count_freed=lambda: 0),
    )
    take(store, Table.witness_name(name), found.source(), alone, SingleProcess())


def _compared(name: str, there: Contents, found: _Table) -> WitnessReport:
    if not there.row.is_witness:
        raise SnapshotExistsError(
            f"{there.label} is a snapshot, and its name is that of the witness {name!r}; choose "
            "another name for the witness"
        )
    with there.reading():
        same = manifest_of(found.source(), there.store.config.chunk_size)
        if same.shared == there.manifest.shared:
            return WitnessReport(name)
        stored = _Table.read(there)
        if stored.ranks != found.ranks:
            # Other ranks add up in another order, so nothing would be proven.
            why = f"{stored.ranks} ranks had it, and this is {found.ranks}"
            return WitnessReport(name, not_compared=why)
        before, now = stored.by_path(there.label), found.by_path(name)
        changes = changes_since(there.environment, found.ranks, found.ranks, with_commit=True)
    differing = sorted(p for p in before.keys() | now.keys() if before.get(p) != now.get(p))
    forms = ((path, (now.get(path) or before[path])[0]) for path in differing)
    by_role = first_of_each_role((path, role_of_form(path, form)) for path, form in forms)
    environment = [change.text for change in changes]
    return WitnessReport(name, False, len(differing), dict(by_role), environment)
