"""Thinning: older snapshots of a run lose the keys that only a resume needs, and keep the rest.

A thinned snapshot has the row that it had, with another manifest: without those keys, and with
their names. The row notes which patterns were applied, so that no manifest is read again
(``docs/decisions/0066-publish-and-thin.md``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import msgspec

from casnap.errors import EntryNotFoundError, nearest
from casnap.format.digest import Digest
from casnap.format.entries import Manifest
from casnap.format.names import folder_of, key_of
from casnap.format.records import THINNED, NodeRef, Row, encode
from casnap.runtime.units import whole_number
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.changes import Change, commit_change
from casnap.storage.snapshots.contents import Contents
from casnap.storage.snapshots.runs import in_commit_order, runs_of
from casnap.storage.snapshots.table import Table
from casnap.storage.writing.session import Session

_log = logging.getLogger("casnap")
# The note of the patterns that were applied to a snapshot.
_APPLIED = "thin"
_PATTERN_CHARS = 90
# The runs, and their rules, whose patterns takes of this process have checked.
_checked: set[tuple[str, str, frozenset[str]]] = set()

Rules = Mapping[str, int]
"""Of each pattern of keys, how many of the newest snapshots of each run keep them."""


@dataclass(frozen=True)
class Thinned:
    """A snapshot that lost some keys.

    Attributes:
        before: Its row before that.
        keys: The keys that it lost.
    """

    before: Row
    keys: tuple[str, ...]


def check_rules(rules: object) -> dict[str, int]:
    """Return the rules of a thinning.

    Raises:
        ValueError: They make no sense.
    """
    if isinstance(rules, Mapping) and rules and all(map(_is_rule, rules.items())):
        return {pattern: int(count) for pattern, count in rules.items()}
    raise ValueError(
        "thin says of whole keys of the app state how many of the newest snapshots of each run "
        'keep them, such as {"optim/**": 2}: at least one snapshot, and a pattern of up to '
        f"{_PATTERN_CHARS} characters without a slash but that of /**; got {rules!r:.200}"
    )


def _is_rule(rule: tuple[object, object]) -> bool:
    pattern, count = rule
    if not isinstance(pattern, str):
        return False
    glob = pattern.removesuffix("/**")
    fits = bool(glob) and len(pattern) <= _PATTERN_CHARS and pattern.isprintable()
    return fits and "/" not in glob and (whole_number(count) or 0) >= 1


def thin_table(
    store: Repository,
    rows: Iterable[tuple[str, Row]],
    rules: Rules,
    put: Callable[[bytes], NodeRef],
    added: str = "",
) -> tuple[dict[str, Row], dict[str, Thinned]]:
    """Return the new rows of the snapshots that some rules thin, and what these lose.

    A snapshot that something holds stays whole, such as one with a tag.

    Args:
        store: The store.
        rows: Names and rows, whole runs of them.
        rules: The rules.
        put: Stores a node, whether it is there or not, and returns it.
        added: The name of the row that the same commit adds, which stays as it is.

    Raises:
        DamagedError: A manifest is missing or damaged.
    """
    due: dict[str, list[str]] = {}
    by_name: dict[str, Row] = {}
    for run in runs_of(rows):
        for pattern, count in rules.items():
            for name, row in run.older(count):
                is_kept = name == added or bool(row.holds or row.unknown_features)
                if not is_kept and pattern not in _applied_to(row):
                    due.setdefault(name, []).append(pattern)
                    by_name[name] = row
    store.cache_nodes([Digest(by_name[name].manifest.digest) for name in due])
    new_rows: dict[str, Row] = {}
    thinned: dict[str, Thinned] = {}
    for name, patterns in due.items():
        row = by_name[name]
        manifest, lost = _without_keys(Contents(store, name, row), patterns)
        new_rows[name] = row.with_notes({_APPLIED: sorted({*_applied_to(row), *patterns})})
        if lost:
            new_rows[name] = msgspec.structs.replace(
                new_rows[name].with_notes({THINNED: True}), manifest=put(encode(manifest))
            )
            thinned[name] = Thinned(row, tuple(map(key_of, lost)))
    return new_rows, thinned


def _applied_to(row: Row) -> list[str]:
    patterns = row.notes.get(_APPLIED)
    return [p for p in patterns if isinstance(p, str)] if isinstance(patterns, list) else []


def _without_keys(contents: Contents, patterns: list[str]) -> tuple[Manifest, list[str]]:
    """Return a manifest without the keys that patterns match, and the components of these."""
    manifest = contents.manifest

    def stays(component: str) -> bool:
        return not any(_matches(pattern, key_of(component)) for pattern in patterns)

    components = {c for trees in (manifest.shared, *manifest.ranks.values()) for c in trees}
    lost = sorted(component for component in components if not stays(component))
    if len(lost) == len(components):
        if lost:
            _log.warning(
                "%s stays whole: %s would leave nothing of it; delete it instead",
                contents.label,
                ", ".join(patterns),
            )
        return manifest, []
    shared = {c: digest for c, digest in manifest.shared.items() if stays(c)}
    ranks = {
        rank: {c: digest for c, digest in trees.items() if stays(c)}
        for rank, trees in manifest.ranks.items()
    }
    thinned = tuple(sorted({*manifest.thinned, *lost}))
    new = msgspec.structs.replace(manifest, shared=shared, ranks=ranks, thinned=thinned)
    return new, lost


def _matches(pattern: str, key: str) -> bool:
    return fnmatchcase(key, pattern.removesuffix("/**"))


def check_keys(store: Repository, rows: Iterable[tuple[str, Row]], rules: Rules) -> None:
    """Check that some snapshot has, or has lost by thinning, a key that each pattern matches.

    Raises:
        EntryNotFoundError: None has one for a pattern.
        DamagedError: A manifest is missing or damaged.
    """
    unmatched, keys = list(rules), set[str]()
    for name, row in reversed(in_commit_order(rows)):
        if row.unknown_features:
            continue
        contents = Contents(store, name, row)
        keys |= contents.keys() | set(map(key_of, contents.manifest.thinned))
        unmatched = [p for p in unmatched if not any(_matches(p, key) for key in keys)]
        if not unmatched:
            return
    if keys:
        pattern = unmatched[0].removesuffix("/**")
        advice = nearest(pattern, keys) or f"; the keys are {', '.join(sorted(keys))[:200]}"
        raise EntryNotFoundError(f"no snapshot has a key that {unmatched[0]!r} matches{advice}")


def putting_in(session: Session) -> Callable[[bytes], NodeRef]:
    """Return what stores the new manifests in a change of the table, while that is made."""
    # Always anew: what it relied on would be known too late.
    return lambda node: session.ref(session.put_table_node(node))


def thin_run(
    store: Repository,
    rows: Iterable[tuple[str, Row]],
    rules: Rules | None,
    session: Session,
    added: str,
) -> dict[str, Row]:
    """Return the rows of a run that are thinned by the commit that adds a snapshot to it.

    An error is a warning only: the next one thins them.
    """
    if rules is None:
        return {}
    try:
        rows = list(rows)
        new_rows, _ = thin_table(store, rows, rules, putting_in(session), added)
        if new_rows:
            _warn_of_keys(store, rows, rules, added)
    except Exception as e:  # noqa: BLE001
        text = "%s is added, but its run is not thinned: %s: %s"
        _log.warning(text, added, type(e).__name__, e)
        return {}
    return new_rows


def _warn_of_keys(
    store: Repository, rows: Iterable[tuple[str, Row]], rules: Rules, added: str
) -> None:
    """Log a warning, once for a run, if a pattern matches no key of any snapshot."""
    run = (store.config.store_id, folder_of(added), frozenset(rules))
    if run not in _checked:
        _checked.add(run)
        try:
            check_keys(store, [(name, row) for name, row in rows if name != added], rules)
        except EntryNotFoundError as e:
            _log.warning("%s: thin= has no effect: %s", added, e.args[0])


def thin(
    store: Repository,
    rules: Rules,
    folder: str,
    pruning: Change | None = None,
    *,
    dry_run: bool = False,
) -> dict[str, Thinned]:
    """Thin the runs in a folder, in one commit; return what each snapshot lost, or would lose.

    Args:
        store: The store.
        rules: The rules.
        folder: The folder; "" for the whole store.
        pruning: Says which snapshots the same commit removes; None for none.
        dry_run: Change nothing.
    """
    thinned: dict[str, Thinned] = {}

    def change_with(
        put: Callable[[bytes], NodeRef], table: Table, seq: int
    ) -> dict[str, Row | None]:
        nonlocal thinned
        removed = pruning(table, seq) if pruning is not None else {}
        rows = [(name, row) for name, row in table.items_in(folder) if name not in removed]
        new_rows, thinned = thin_table(store, rows, rules, put)
        return {**removed, **new_rows}

    if dry_run:
        look = partial(change_with, lambda _: NodeRef(b"", None))
        store.read_at_newest(lambda root: look(store.table(root), root.seq + 1))
    else:
        commit_change(store, lambda session: partial(change_with, putting_in(session)))
    return thinned
