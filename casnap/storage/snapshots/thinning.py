"""Thinning: older snapshots of a run lose the keys that only a resume needs, and keep the others.

Thinning gives the row of a snapshot another manifest, which lacks these keys and lists their names.
The row notes which patterns were applied, so that no manifest is read again
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
from casnap.storage.reading.table import Table
from casnap.storage.snapshots.changes import Change, Changes
from casnap.storage.snapshots.contents import Contents
from casnap.storage.snapshots.runs import runs_of
from casnap.storage.writing.session import Session

_log = logging.getLogger("casnap")
# The note of the patterns that were applied to a snapshot.
_APPLIED = "thin"
_PATTERN_CHARS = 90
# The runs for which takes of this process have checked patterns: store, folder and patterns.
_checked: set[tuple[str, str, frozenset[str]]] = set()

Rules = Mapping[str, int]
"""A pattern of keys → how many of the newest snapshots of each run keep the keys that match."""


@dataclass(frozen=True)
class Thinned:
    """A snapshot that was thinned.

    Attributes:
        before: The row of the snapshot before it was thinned.
        keys: The keys that the snapshot lost.
    """

    before: Row
    keys: tuple[str, ...]


def check_rules(rules: object) -> dict[str, int]:
    """Check rules of thinning that a user gave, and return them with counts as ints.

    Raises:
        ValueError: There is no rule, or one is malformed.
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
    """Thin the snapshots to which rules must still be applied. The caller commits the new rows.

    A snapshot with a hold, such as a tag, is not thinned. The last healthy snapshot of a run whose
    later snapshots are unhealthy is not thinned either.

    Args:
        store: The store.
        rows: The names and rows of all snapshots of some runs.
        rules: The rules.
        put: Stores a node, even if the store has it, and returns a reference to it.
        added: The name of the snapshot that the same commit adds. It is not thinned.

    Returns:
        The new rows, by the name of the snapshot; and the thinned snapshots, by name. A snapshot
        that has no matching key gets a new row too, which notes the patterns.

    Raises:
        DamagedError: A manifest is missing or damaged.
    """
    due: dict[str, list[str]] = {}
    by_name: dict[str, Row] = {}
    for run in runs_of(rows):
        stay = {added, run.last_healthy}
        for pattern, count in rules.items():
            for name, row in run.older(count):
                is_kept = name in stay or bool(row.holds or row.unknown_features)
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
    """Return a snapshot's manifest without the keys that match patterns.

    Returns:
        The manifest, and the path components of the removed keys. If all keys match, none is
        removed.
    """
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
    left = {digest for trees in (shared, *ranks.values()) for digest in trees.values()}
    health = {
        tree: record for tree, record in (manifest.health_by_tree or {}).items() if tree in left
    }
    new = msgspec.structs.replace(
        manifest, shared=shared, ranks=ranks, thinned=thinned, health=health
    )
    return new, lost


def _matches(pattern: str, key: str) -> bool:
    return fnmatchcase(key, pattern.removesuffix("/**"))


def check_keys(store: Repository, rows: Iterable[tuple[str, Row]], rules: Rules) -> None:
    """Check that each pattern matches a key that some snapshot has, or has lost by thinning.

    Raises:
        EntryNotFoundError: A pattern matches no key of any snapshot.
        DamagedError: A manifest is missing or damaged.
    """
    unmatched, keys = list(rules), set[str]()
    for name, row in reversed(Table.in_commit_order(rows)):
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
    """Return a function that stores a manifest in a session, for :func:`thin_table`."""
    # Store a manifest even if a pack has it: it is too late for the session to rely on that pack.
    return lambda node: session.ref(session.put_table_node(node))


def thin_run(
    store: Repository,
    rows: Iterable[tuple[str, Row]],
    rules: Rules | None,
    session: Session,
    added: str,
) -> dict[str, Row]:
    """Thin older snapshots of a run, in the commit that adds a new snapshot.

    An error is only logged as a warning: the next commit thins these snapshots.

    Args:
        store: The store.
        rows: The names and rows of the run.
        rules: The rules; None for none.
        session: The session that commits.
        added: The name of the new snapshot.

    Returns:
        The new rows of the older snapshots, by name.
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
    """Log a warning, once for each run, if a pattern matches no key of any snapshot."""
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
    """Thin the runs in a folder, in one commit; return the thinned snapshots by name.

    Args:
        store: The store.
        rules: The rules.
        folder: The folder; "" for the whole store.
        pruning: A change that removes snapshots in the same commit; None to remove none.
        dry_run: Whether to change nothing, and return the snapshots that would be thinned.
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
        Changes(store).commit_with(lambda session: partial(change_with, putting_in(session)))
    return thinned
