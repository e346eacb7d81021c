"""Restore an app state, in place where possible, by one process or many ranks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch

from casnap.errors import CasnapError, MismatchError, retold
from casnap.format.entries import ContainerEntry, Entry, TensorEntry, ValueEntry, check_known
from casnap.format.names import component_of, key_of, rank_names
from casnap.format.records import Root
from casnap.format.region import Region
from casnap.ranks.comm import Comm
from casnap.restore.comparison import compare, load_what_fits, load_whole, why_refused
from casnap.restore.key_state import KeyState, key_state
from casnap.restore.loaders import known_loader
from casnap.restore.loading import Loading
from casnap.restore.moments import taken_parameters, without_misfits, without_named_misfits
from casnap.restore.remarks import log_remarks
from casnap.restore.renaming import Rename, renamed
from casnap.restore.restore_report import NewRanks, RestoreReport, mismatch_message
from casnap.restore.shared_reads import fetch_shared
from casnap.restore.shared_trees import share_trees
from casnap.restore.targets import Part, conflicts, memory_of, targets_of
from casnap.restore.ties import conflict_text, conflicting_ties
from casnap.restore.versions import with_versions
from casnap.restore.wrappers import advice_on_wrappers
from casnap.runtime.environment import boot_id
from casnap.runtime.machine import DiskReads
from casnap.runtime.progress import Progress
from casnap.runtime.threads import python_gc_paused
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.devices import synchronize
from casnap.state.flatten import fill_targets, inflate
from casnap.state.overlap import fill_shared_memory
from casnap.state.sharded import Shards
from casnap.state.stateful import (
    AppState,
    RNGState,
    Stateful,
    is_random_state,
    random_states_first,
    with_states,
)
from casnap.state.tensors import Leaf
from casnap.state.values import check_pickle_allowed
from casnap.storage import Contents


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """The options of :meth:`casnap.Snapshot.restore`, which describes them.

    Raises:
        ValueError: ``new_ranks`` is neither None, ``"keep"`` nor ``"error"``.
    """

    strict: bool = True
    new_ranks: NewRanks | None = None
    allow_pickle: bool = False
    progress: Progress | None = None
    read_once: bool | None = None
    reuse: bool = False
    rename: Rename | None = None

    def __post_init__(self) -> None:
        if self.new_ranks not in (None, "keep", "error"):
            raise ValueError(f"new_ranks is 'keep' or 'error'; got {self.new_ranks!r:.80}")

    def refuses(self, missed: _Missed) -> bool:
        """Whether the restore fails because new ranks cannot have a part of a key."""
        if self.new_ranks is None:
            return self.strict and not missed.is_random
        return self.new_ranks == "error"


def restore(
    contents: Contents, given: AppState, options: RestoreOptions, comm: Comm
) -> RestoreReport:
    """Restore an app state, or some of its keys. All ranks call this.

    Raises:
        MismatchError: With ``strict``, the snapshot lacks a key, or a module, optimizer or dict
            differs from it. The message lists every difference, and no rank has written anything.
            Or a ``load_state_dict`` raised an error, which is the cause of this one; the message
            tells what was restored before.
        UnsupportedTypeError: A value cannot be decoded here, or only with ``allow_pickle``; nothing
            was written.
        UnsupportedFormatError: A newer version wrote some entries; nothing was written.
        DeviceError: A device does not hold what was copied to it, or computes wrong digests; as
            with damage, tensors may be filled in part.
        DamagedError: Something is damaged. No ``load_state_dict`` was called, but tensors that
            are restored in place may already hold new values.
        RankError: Another rank failed, died or hangs.
    """
    comm.enter_phase("beginning a restore")
    app_state = with_states(given)
    disk = DiskReads()
    report = RestoreReport(left_behind=_left_behind(contents, comm.size))
    if options.rename is not None:
        app_state = _by_stored_keys(contents, app_state, options.rename, report)
    agreed = _agree(contents, app_state, options, comm)
    keys = [key for key in map(key_of, agreed.order) if key in app_state]
    kept_for_others: dict[str, dict[str, list[int]]] = {}
    key_states = [
        key_state(contents, key, app_state[key], report, comm.rank, kept_for_others) for key in keys
    ]  # each state_dict() is called in the torch modes of the caller
    for state in key_states:
        if state is not None:
            check_known(contents.label, state.entries.items())
    compared = [state for state in key_states if state is not None]
    states, targets, overlapping = _compared(contents, compared, report)
    in_part = {state.component for state in compared}
    mine = {
        component: _Missed.of(component, holders, app_state[key_of(component)], in_part)
        for component, holders in kept_for_others.items()
    }
    missed = _missed_by_new_ranks(contents, mine, comm)
    refused = [each.text for each in missed if options.refuses(each)]
    if refused or (options.strict and report):
        wrong = report if options.strict else RestoreReport()
        wrong.new_ranks = refused
        renames = options.rename is not None
        advice = _advice(contents, app_state, wrong, states, renames=renames)
        raise MismatchError(mismatch_message(wrong, contents.label, advice))
    report.new_ranks = [each.text for each in missed]
    entries = {path: entry for state in states for path, entry in state.entries.items()}
    for path, entry in entries.items():
        if isinstance(entry, ValueEntry) and not options.allow_pickle:
            check_pickle_allowed(path, entry.kind)
    comm.enter_phase("reading")
    held = _held(states) if options.reuse else {}
    known, leaves, kept_bytes = _load(
        contents, entries, targets, overlapping, held, options, comm, agreed
    )
    report.kept_bytes = kept_bytes
    for state in states:
        known |= state.known
        known |= with_versions(state, known)
    report.environment = log_remarks(contents, entries.items(), comm.rank, comm.size)
    # No rank changes its state before all ranks have read everything.
    comm.all_gather(b"")
    comm.enter_phase("loading states")
    # The random state comes last, since loading the others may draw random numbers.
    states.sort(key=lambda s: isinstance(s.stateful, RNGState))
    with without_torch_modes():
        values = [inflate(s.component, leaves, known=known, skipped=s.skipped) for s in states]
    for i, state in enumerate(states):
        try:
            _load_state(state, values[i], report, strict=options.strict)
        except Exception as e:
            text = _what_failed(state, e, states[:i], states[i:], targets)
            cause = e if isinstance(e, CasnapError) else MismatchError()
            raise retold(cause, f"{contents.label}: {text}") from e
    with without_torch_modes():
        synchronize(_on_devices(states, targets))
    comm.all_gather(b"")
    report.disk_bytes = disk.nbytes()
    return report


def _advice(
    contents: Contents,
    app_state: Mapping[str, Stateful],
    report: RestoreReport,
    states: Iterable[KeyState],
    *,
    renames: bool,
) -> Iterator[str]:
    """Yield advice about a state that does not fit.

    Args:
        contents: The snapshot.
        app_state: The app state.
        report: The parts that do not fit.
        states: The keys that both the state and the snapshot have, with the entries that fit.
        renames: Whether the caller passed ``rename=``.
    """
    has = contents.keys()
    if renames or not has.issuperset(app_state):
        keys = ", ".join(sorted(has))
        yield f"The snapshot has the keys {keys:.1000}. rename= maps them to others."
    lost = {key_of(component) for component in contents.manifest.thinned}
    if lost.intersection(report.missing):
        text = contents.thinned_text()
        yield f"{text[:1].upper()}{text[1:]}."
    for component in map(component_of, app_state):
        missing, unexpected = (
            [key_of(p.partition("/")[2]) for p in paths if p.startswith(f"{component}/")]
            for paths in (report.missing, report.unexpected)
        )
        if advice := advice_on_wrappers(component, missing, unexpected):
            yield advice
    if report.new_ranks:
        yield 'Pass new_ranks="keep" to have new ranks keep what they hold of these keys.'
    if not report:
        return
    fitting = {
        key_of(state.component)
        for state in states
        if not all(isinstance(entry, ContainerEntry) for entry in state.entries.values())
    }
    if fitting:
        unfit = ", ".join(sorted(app_state.keys() - fitting))
        yield "Pass strict=False to restore what fits" + (unfit and f", nothing of {unfit}") + "."


def _on_devices(
    states: Iterable[KeyState], targets: Mapping[str, Shards]
) -> Iterator[torch.Tensor]:
    """Yield tensors, at least one on each device on which the restore writes."""
    for shards in targets.values():
        yield from shards.tensors
    for state in states:
        # An optimizer without moments gets new ones on the devices of its parameters.
        if isinstance(state.stateful, torch.optim.Optimizer):
            yield from (p for group in state.stateful.param_groups for p in group["params"])


@python_gc_paused()
@without_torch_modes()
def _compared(
    contents: Contents, key_states: Sequence[KeyState], report: RestoreReport
) -> tuple[list[KeyState], dict[str, Shards], list[list[Part]]]:
    """Report how the keys differ from the snapshot.

    Returns: The keys that can be restored, with the entries that fit; the live tensors of these
    keys to fill in place, by path; and the groups of tensors that share memory here, but differ in
    the snapshot.
    """
    states: list[KeyState] = []
    targets: dict[str, Shards] = {}
    has_optimizer = any(isinstance(s.stateful, torch.optim.Optimizer) for s in key_states)
    taken = taken_parameters(key_states) if has_optimizer else {}
    modules = [s.stateful for s in key_states if isinstance(s.stateful, torch.nn.Module)]
    for state in key_states:
        if refused := why_refused(contents, state):
            report.mismatched += refused
            continue
        if isinstance(state.stateful, torch.nn.Module):
            states.append(compare(contents, state, state.stateful, report))
        elif known_loader(state.stateful) is torch.optim.Optimizer:
            assert isinstance(state.stateful, torch.optim.Optimizer)
            states.append(without_misfits(contents, state, state.stateful, taken, report))
        elif known_loader(state.stateful) is None and not isinstance(
            state.stateful, torch.optim.Optimizer
        ):
            states.append(without_named_misfits(state, modules, report))
        else:
            states.append(state)  # an optimizer's own loader, or hook, may make moments fit
        targets |= targets_of(states[-1])
    return _without_conflicts(contents, states, targets, report)


def _without_conflicts(
    contents: Contents,
    states: list[KeyState],
    targets: dict[str, Shards],
    report: RestoreReport,
) -> tuple[list[KeyState], dict[str, Shards], list[list[Part]]]:
    """Report tensors of modules that share memory here, but differ in the snapshot.

    Tensors of other values are not reported: each of them gets new memory, and need not stay tied.

    Returns: As :func:`_compared` does, without the reported tensors. Each group that is left has at
    least one tensor of a value that is not a module.
    """
    entries = {
        path: entry for state in states for path, entry in state.entries.items() if path in targets
    }
    groups = conflicts(memory_of(targets), entries)
    if not groups:
        return states, targets, groups
    in_groups = {path: targets[path] for group in groups for path, _ in group}
    modules = {s.component for s in states if isinstance(s.stateful, torch.nn.Module)}
    of_modules = {p: shards for p, shards in in_groups.items() if p.split("/")[0] in modules}
    ties = conflicting_ties(contents, of_modules, entries)
    report.mismatched += map(conflict_text, ties)
    unfit = frozenset(path for paths in ties for path in paths)
    # If a group agrees, each part of it agrees too, so only these groups have to be looked at.
    in_groups = {path: shards for path, shards in in_groups.items() if path not in unfit}
    return (
        [replace(state.without(unfit), skipped=state.skipped | unfit) for state in states],
        {path: shards for path, shards in targets.items() if path not in unfit},
        conflicts(memory_of(in_groups), entries),
    )


@without_torch_modes()
def _held(states: Iterable[KeyState]) -> dict[str, Shards]:
    """Return path → live tensor, for all live tensors, even those that the restore replaces."""
    return {
        path: shards
        for state in states
        for path, shards in fill_targets(state.current, state.component).items()
    }


def _load_state(state: KeyState, value: Any, report: RestoreReport, *, strict: bool) -> None:
    if isinstance(state.stateful, torch.nn.Module) and (state.skipped or not strict):
        load_what_fits(state, state.stateful, value, report)
        if strict and report:
            # Names that only the module itself can check.
            raise MismatchError(f"missing: {report.missing}; unexpected: {report.unexpected}")
    elif known_loader(state.stateful) is torch.nn.Module:
        assert isinstance(state.stateful, torch.nn.Module)
        load_whole(state, state.stateful, value)
    else:
        state.stateful.load_state_dict(value)


def _what_failed(
    state: KeyState,
    error: Exception,
    before: Iterable[KeyState],
    others: Iterable[KeyState],
    targets: Iterable[str],
) -> str:
    """Return a message about an error of a ``load_state_dict``, and the keys restored before it.

    Args:
        state: The key whose loader raised the error.
        error: The error.
        before: The keys that were loaded before it.
        others: The keys that were to be loaded after it.
        targets: The paths of tensors that were filled in place.
    """
    restored_keys = {path.partition("/")[0] for path in targets}
    loaded = ", ".join(key_of(s.component) for s in before)
    partly = ", ".join(
        key_of(s.component)
        for s in others
        if s.component in restored_keys and known_loader(s.stateful) is not None
    )
    return (
        f"load_state_dict() of {key_of(state.component)!r} raised {type(error).__name__}: {error}. "
        f"Restored before: {loaded or 'nothing'}"
        + (f"; only tensors were filled in place of: {partly}" if partly else "")
    )


def _by_stored_keys(
    contents: Contents, app_state: Mapping[str, Stateful], rename: Rename, report: RestoreReport
) -> dict[str, Stateful]:
    """Apply ``rename`` to the keys of an app state; report the keys that the snapshot lacks.

    A key is missing only if the snapshot has it for no rank, so all ranks report the same keys.

    Returns:
        The key in the snapshot → the value in the app state.
    """
    keys = contents.keys()
    keys_by_stored = renamed(contents.label, {key: key for key in sorted(keys)}, rename)
    ordered_keys = random_states_first(app_state)
    report.missing += [key for key in ordered_keys if key not in keys_by_stored]
    return {keys_by_stored[key]: app_state[key] for key in ordered_keys if key in keys_by_stored}


class _OwnKeys(msgspec.Struct, array_like=True):
    """The message in which a rank says which keys it restores, and through which cache it reads.

    Attributes:
        keys: The keys of its app state, as components: a key need not be Unicode.
        cache: The identity of its cache; empty if there is none, or it is unknown. For a remote
            store this is the host's cache of nodes, else the page cache.
    """

    keys: list[str]
    cache: bytes = b""


class _Agreement(msgspec.Struct, array_like=True):
    """The message in which rank 0 says how all ranks restore.

    Attributes:
        commit: The commit id of the snapshot.
        manifest: The digest of its manifest. It differs on a rank that opened the snapshot before
            it was thinned.
        read_once: The option ``read_once=`` of rank 0.
        has_one_cache: Whether all ranks see the store through one page cache.
        order: The components of the keys of all ranks, in the order in which all ranks load them.
        root: A recent root, if rank 0 reads roots and trees for all ranks.
    """

    commit: bytes
    manifest: bytes
    read_once: bool | None
    has_one_cache: bool
    order: list[str]
    root: Root | None = None


def _agree(
    contents: Contents, app_state: Mapping[str, Stateful], options: RestoreOptions, comm: Comm
) -> _Agreement:
    """Agree with the other ranks on which keys to restore, in which order, and how.

    All ranks need one order, since a ``state_dict()`` or ``load_state_dict()`` may be a collective.
    """
    backend = contents.store.backend
    one_asks = backend.costs.one_asks and comm.size > 1
    own_keys = _OwnKeys([component_of(key) for key in random_states_first(app_state)])
    if one_asks:
        own_keys.cache = contents.store.cache_identity
    elif comm.size > 1 and (boot := boot_id()):
        own_keys.cache = f"{boot} {backend.identity}".encode()
    everyone = comm.gather_messages(own_keys, _OwnKeys)
    order = list(dict.fromkeys(key for of_rank in everyone for key in of_rank.keys))
    root = contents.store.recent() if one_asks and comm.rank == 0 else None
    caches = {of_rank.cache for of_rank in everyone}
    has_one_cache = not one_asks and len(caches) == 1 and b"" not in caches
    row = contents.row
    mine = _Agreement(
        row.commit, row.manifest.digest, options.read_once, has_one_cache, order, root
    )
    agreed = comm.broadcast_message(mine, _Agreement)
    commit = agreed.commit.hex()
    comm.check_same(f"the commit of {contents.label}", row.commit.hex(), commit)
    manifest = agreed.manifest.hex()
    comm.check_same(f"the manifest of {contents.label}", row.manifest.digest.hex(), manifest)
    comm.check_same("the option read_once=", options.read_once, agreed.read_once)
    if agreed.root is not None:
        contents.store.observe_root(agreed.root)
        share_trees(comm, contents, agreed.order, [of_rank.cache for of_rank in everyone])
    return agreed


class _Missed(msgspec.Struct, array_like=True):
    """A message between ranks: the part of one key that new ranks cannot restore.

    New ranks are those that the take did not have. The take stored this part for single ranks only.

    Attributes:
        what: What new ranks cannot restore: the key, or some of its paths, in words.
        is_one: Whether ``what`` is singular, for the verb of the sentence.
        holders: The ranks for which the snapshot keeps it.
        is_random: Whether the key is the state of random generators.
        new_ranks: The new ranks.
    """

    what: str
    is_one: bool
    holders: list[int]
    is_random: bool
    new_ranks: list[int] = []

    @classmethod
    def of(
        cls,
        component: str,
        holders: Mapping[str, list[int]],
        stateful: Stateful,
        in_part: Container[str],
    ) -> _Missed:
        """Return the message about a key.

        Args:
            component: The key, as a component of paths.
            holders: The paths that this rank cannot restore, each with the ranks that can.
            stateful: The value in the app state.
            in_part: The components of the keys that this rank can restore in part.
        """
        paths = [path for path in holders if path != component]
        what, is_one = component, True
        if component in in_part and paths:
            is_one, what = len(paths) == 1, ", ".join(paths[:3])
            if len(paths) > 3:
                what += f" and {len(paths) - 3:,} more of {component}"
        ranks = sorted({rank for of_path in holders.values() for rank in of_path})
        return cls(what, is_one, ranks, is_random_state(stateful))

    @property
    def text(self) -> str:
        """The sentence that says what new ranks cannot restore, and which ranks can."""
        verbs = ["is" if one else "are" for one in (self.is_one, len(self.new_ranks) == 1)]
        return (
            f"{self.what} {verbs[0]} kept for {rank_names(self.holders)} alone; "
            f"{rank_names(self.new_ranks)} {verbs[1]} new"
        )


class _MissedByKey(msgspec.Struct, array_like=True):
    """A message between ranks: by component of a key, what new ranks cannot restore of the key."""

    by_key: dict[str, _Missed]


def _missed_by_new_ranks(
    contents: Contents, mine: dict[str, _Missed], comm: Comm
) -> Iterable[_Missed]:
    """Gather from all ranks what new ranks cannot restore; return one item for each key.

    The result is the same on all ranks.

    Args:
        contents: The snapshot.
        mine: What this rank cannot restore of each key, by the component of the key.
        comm: The ranks; all call this.
    """
    if comm.size <= contents.row.world_size:
        return ()
    joined: dict[str, _Missed] = {}
    for rank, of_rank in enumerate(comm.gather_messages(_MissedByKey(mine), _MissedByKey)):
        for key, missed in of_rank.by_key.items():
            joined.setdefault(key, missed).new_ranks.append(rank)
    return comm.broadcast_message(_MissedByKey(joined), _MissedByKey).by_key.values()


def _left_behind(contents: Contents, size: int) -> list[str]:
    ranks = (rank for rank in contents.ranks() if rank >= size)
    return [f"{rank}/{key}" for rank in ranks for key in sorted(contents.manifest.ranks[str(rank)])]


@python_gc_paused()
@without_torch_modes()
def _load(
    contents: Contents,
    entries: dict[str, Entry],
    targets: Mapping[str, Shards],
    groups: Sequence[Sequence[Part]],
    held: Mapping[str, Shards],
    options: RestoreOptions,
    comm: Comm,
    agreed: _Agreement,
) -> tuple[dict[str, Any], dict[str, Leaf], int]:
    """Read all entries, each into its target if it has one. Ranks share reads if that saves time.

    Args:
        contents: The snapshot.
        entries: The entries, by path.
        targets: The live tensors to fill in place, by path.
        groups: The groups of targets that share memory here, but differ in the snapshot.
        held: All live tensors, by path, if ``reuse=True``.
        options: The options of the restore.
        comm: The ranks.
        agreed: What the ranks agreed on.

    Returns: The values and containers, decoded; the leaves of the tensors; and how many bytes were
    not read, since tensors in ``held`` had them.
    """
    loading = Loading(contents, options.progress)
    memory = memory_of(targets)
    # To fill a tensor of a group could overwrite a part of another one, so the groups are read into
    # new memory first.
    grouped_paths = {path for group in groups for path, _ in group}
    for path in sorted(path for path in grouped_paths if targets[path].is_sharded):
        raise MismatchError(
            f"{contents.label}: {path} shares its memory with another tensor here, but differs "
            "from it in the snapshot; nothing was restored. Untie them, or restore into plain "
            "tensors"
        )
    synchronize(memory.values())
    for path, entry in entries.items():
        shards = None if path in grouped_paths else targets.get(path)
        holders = _holders(entry, shards, held.get(path))
        if shards is None:
            loading.add(path, entry, held=holders)
        else:
            pairs = zip(shards.boxes, shards.tensors, strict=True)
            loading.add(path, entry, pairs, shards.value, holders)
    fetch = None
    if options.read_once is not False:
        # If all ranks share a page cache, it reads each byte once anyway, and hands it on faster
        # than sockets do.
        only_in_memory = options.read_once is None and agreed.has_one_cache
        fetch = partial(fetch_shared, comm, contents.store, only_in_memory=only_in_memory)
    known = loading.load_values(fetch, allow_pickle=options.allow_pickle)
    # From here on tensors are written, so every rank must have finished its checks.
    comm.all_gather(b"")
    leaves = loading.load(fetch=fetch)
    for group in groups:
        fillings = [(memory[part], leaves[part[0]].content) for part in group]
        # If the contents disagree, the loaders get new tensors, and fill the live ones themselves.
        if fill_shared_memory(fillings):
            leaves |= {
                part[0]: msgspec.structs.replace(leaves[part[0]], content=memory[part])
                for part in group
            }
    return known, leaves, loading.kept_bytes


def _holders(entry: Entry, target: Shards | None, live: Shards | None) -> tuple[torch.Tensor, ...]:
    """Return the live tensors that may hold an entry's elements already.

    There is one for each box that is to be read. The result is empty if the shards of the live
    tensor have other boxes.

    Args:
        entry: The entry to read.
        target: The tensor to fill; None for new memory.
        live: The tensor that the app state has at this path.
    """
    if live is None or not isinstance(entry, TensorEntry):
        return ()
    if target is not None and target.value is live.value:
        return target.tensors
    boxes = (Region.whole(entry.shape),) if target is None else target.boxes
    return live.tensors if live.boxes == boxes else ()
