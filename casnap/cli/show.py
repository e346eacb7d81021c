"""``casnap show``."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

import click

from casnap.cli.arguments import (
    identity_of,
    metadata_of,
    open_snapshot,
    reading_options,
    snapshot_fields,
)
from casnap.cli.entries import entry_fields, keys_in_words, small_value
from casnap.cli.output import (
    emit,
    moment,
    print_rest,
    progress_bars,
    safe,
    say,
    size,
    summary,
    table,
)
from casnap.format.entries import (
    ContainerEntry,
    Entry,
    TensorEntry,
    ValueEntry,
    type_text,
    unknown_in,
)
from casnap.format.names import is_hashed
from casnap.format.records import Stats
from casnap.maintenance.usage import shared_bytes
from casnap.runtime.sizes import amount
from casnap.snapshot import Snapshot
from casnap.storage import Contents, Entries

Facts = dict[str, Any]


@click.command()
@click.argument("snapshot", metavar="STORE/NAME")
@click.argument("path", required=False)
@click.option("--limit", type=click.IntRange(min=1), help="The most children to print [50; all].")
@click.option(
    "--environment", is_flag=True, help="Show what the take was made with, such as versions."
)
@click.option(
    "--health",
    is_flag=True,
    help="Show what the take has measured of each tensor: NaN, infinities, norm. The worst first.",
)
@reading_options
def show(
    snapshot: str,
    path: str | None,
    limit: int | None,
    environment: bool,
    health: bool,
    as_json: bool,
) -> None:
    """Show the contents of a snapshot, or one entry of it: a tensor, value or container.

    PATH is the path of the entry, with or without the rank. ENTRIES counts the entries at and below
    a path, containers included. KEY is the key of an element, if its path does not show it. SHARED
    is how much of a tensor an earlier snapshot had stored.
    """
    for option, is_given in (("--environment", environment), ("--health", health)):
        if is_given and path is not None:
            raise click.UsageError(f"{option} is about the whole snapshot; give no PATH")
    open_place = open_snapshot(snapshot)
    if path is None:
        from casnap.cli.mirror import commits_lacking

        document = {
            **snapshot_fields(open_place, commits_lacking(open_place.store, [open_place])),
            "keys": list(_keys(open_place.contents)),
            "thinned_keys": list(open_place.thinned),
            "environment": open_place.environment,
            **({"health": _health(open_place)} if health else {}),
        }
        if as_json:
            emit({**document}, open_place.store)
        elif health:
            _print_health(document["health"], limit or 50)
        elif environment:
            noted = document["environment"] or {"environment": "not noted"}
            _print_facts({safe(key): text for key, text in noted.items()})
        else:
            _print_snapshot(open_place, document)
        return
    facts, entry = _entry(open_place.contents, path)
    if as_json:
        if "children" in facts:
            facts["children"] = facts["children"][:limit]
        emit({**identity_of(open_place), **facts}, open_place.store)
    else:
        _print_entry(facts, entry, limit or 50)


# --- facts about a snapshot -------------------------------------------------------------------


def _keys(contents: Contents) -> Iterator[Facts]:
    """Yield a row for each key of the app state: global keys first, then those of each rank."""
    manifest = contents.manifest
    ranks = sorted(manifest.ranks.items(), key=lambda item: (len(item[0]), item[0]))
    for rank, subtrees in ((None, manifest.shared), *ranks):
        for key, digest in sorted(subtrees.items()):
            tree = contents.tree(digest)
            yield {
                "entry": key if rank is None else f"{rank}/{key}",
                "rank": None if rank is None else int(rank),
                "entry_count": len(tree),
                "logical_bytes": sum(entry.payload.nbytes for _, entry in tree.items()),
            }


def _health(snapshot: Snapshot) -> list[Facts]:
    """Return a row for each tensor that was measured, those with NaN and infinities first."""
    measured = sorted(snapshot.health().items(), key=lambda item: item[1].is_finite)
    return [
        {
            "entry": path,
            "nan_count": each.nan,
            "infinite_count": each.infinite,
            "norm": each.norm if isfinite(each.norm) else None,
            "largest": each.largest,
        }
        for path, each in measured
    ]


def _entry(contents: Contents, path: str) -> tuple[Facts, Entry]:
    bare, entry, entries = contents.entry(path)
    inner = bare[len(bare.partition("/")[0]) :]
    facts: Facts = {"entry": path, "rank": entries.owner(inner), **entry_fields(entry)}
    if unknown_in(entry):
        return facts, entry
    if isinstance(entry, TensorEntry):
        facts["chunk_count"] = len(contents.chunks(bare, entry))
        with progress_bars(lambda: contents.store.backend.requests) as report:
            facts["shared_bytes"] = shared_bytes(contents, bare, entry, report)
    elif isinstance(entry, ContainerEntry):
        facts["children"] = _children(entries, inner, path)
        _add_keys(facts["children"], contents, bare, entry)
    elif isinstance(entry, ValueEntry):
        is_shown, value = small_value(contents, bare, entry)
        if is_shown:
            facts["value"] = value
    return facts, entry


def _children(entries: Entries, inner: str, path: str) -> list[Facts]:
    """Return a row for each element of a container, with the totals of everything below it.

    Args:
        entries: The entries of the key.
        inner: The path of the container below the key.
        path: The path of the container, as the command shows it.
    """
    children: dict[str, Facts] = {}
    for inside, entry in entries.items_below(f"{inner}/"):
        name = inside[len(inner) + 1 :].partition("/")[0]
        child = children.setdefault(
            name, {"entry": f"{path}/{name}", "what": "", "entry_count": 0, "logical_bytes": 0}
        )
        if len(inside) == len(inner) + 1 + len(name):
            child["what"] = type_text(entry)
        child["entry_count"] += 1
        child["logical_bytes"] += entry.payload.nbytes
    if all(name.isascii() and name.isdigit() for name in children):
        return [children[name] for name in sorted(children, key=lambda n: (len(n), n))]
    return list(children.values())


def _add_keys(children: list[Facts], contents: Contents, bare: str, entry: ContainerEntry) -> None:
    """Add the key to the row of each element whose path has only a hash of the key.

    Args:
        children: The rows.
        contents: The snapshot.
        bare: The path of the container, without a rank.
        entry: Its entry.
    """
    names = [child["entry"].rpartition("/")[2] for child in children]
    if not any(map(is_hashed, names)):
        return
    keys = keys_in_words(contents, bare, entry)
    for name, child in zip(names, children, strict=True):
        if name in keys:
            child["key"] = keys[name]


# --- printing ---------------------------------------------------------------------------------


def _print_facts(facts: dict[str, str]) -> None:
    width = max(map(len, facts)) + 2
    for name, text in facts.items():
        if text:
            say(f"{name:<{width}}{text}")


def _print_snapshot(snapshot: Snapshot, document: Facts) -> None:
    stats = snapshot.stats
    _print_facts(
        {
            "snapshot": snapshot.path,
            "taken": f"{moment(snapshot.time)}, in {stats.seconds:.3f} s",
            "commit": f"{snapshot.commit_id} (root {snapshot.seq})",
            "ranks": f"{snapshot.world_size}",
            "logical": f"{size(stats.logical_bytes)} in {amount(stats.entries, 'entry')}",
            "new": _new_text(stats),
            "thinned": safe(", ".join(document["thinned_keys"])),
            **({"unhealthy": amount(bad, "tensor")} if (bad := snapshot.unhealthy) else {}),
            "metadata": summary(metadata_of(snapshot), snapshot.tags),
        }
    )
    say()
    rows = [
        (k["entry"], f"{k['entry_count']:,}", size(k["logical_bytes"])) for k in document["keys"]
    ]
    table(("KEY", "ENTRIES", "BYTES"), rows, numbers={"ENTRIES", "BYTES"})


def _print_health(measured: list[Facts], limit: int) -> None:
    if not measured:
        say("no numbers are noted; Store(..., health=True) has takes measure")
        return
    rows = [
        (
            row["entry"],
            *(f"{row[count]:,}" if row[count] else "" for count in ("nan_count", "infinite_count")),
            "" if row["norm"] is None else f"{row['norm']:.6g}",
            f"{row['largest']:.6g}",
        )
        for row in measured[:limit]
    ]
    header = ("PATH", "NAN", "INFINITE", "NORM", "LARGEST")
    table(header, rows, numbers={*header[1:]})
    print_rest(len(measured) - limit, "tensor")


def _new_text(stats: Stats) -> str:
    """Return a text that says how many bytes of a snapshot its take had to store."""
    if not stats.new_bytes:
        return "nothing: the store had all of it"
    return f"{size(stats.new_bytes)} of {size(stats.logical_bytes)}"


def _print_entry(facts: Facts, entry: Entry, limit: int) -> None:
    lines = {"path": facts["entry"], "kind": entry.kind}
    if facts["rank"] is not None:
        lines["scope"] = f"rank {facts['rank']}'s own"
    if "unknown" in facts:
        lines["unknown"] = f"{facts['unknown']}; update casnap"
        lines["bytes"] = _exact(facts["logical_bytes"])
    elif isinstance(entry, TensorEntry):
        lines["dtype"] = entry.dtype
        lines["shape"] = str(list(entry.shape))
        lines["gradient"] = "required" if entry.requires_grad else ""
        lines["quantized"] = facts["quantization"] or ""
        lines["chunks"] = (
            f"{facts['chunk_count']:,}" if facts["chunk_count"] else "none: kept in the tree"
        )
        lines["bytes"] = _exact(facts["logical_bytes"])
        lines["shared"] = f"{_exact(facts['shared_bytes'])} with earlier snapshots"
    elif isinstance(entry, ContainerEntry):
        lines["elements"] = f"{entry.count:,}"
    else:
        lines["bytes"] = _exact(facts["logical_bytes"])
        lines["value"] = repr(facts["value"]) if "value" in facts else ""
    _print_facts(lines)
    if facts.get("children"):
        _print_children(facts["children"], limit)


def _exact(nbytes: int) -> str:
    return f"{nbytes:,} ({size(nbytes)})" if nbytes >= 1000 else size(nbytes)


def _print_children(children: list[Facts], limit: int) -> None:
    say()
    titles = {"entry": "PATH", "key": "KEY", "what": "TYPE"}
    if not any("key" in child for child in children[:limit]):
        del titles["key"]
    rows = [
        (
            *(child.get(field, "") for field in titles),
            f"{child['entry_count']:,}",
            size(child["logical_bytes"]),
        )
        for child in children[:limit]
    ]
    table((*titles.values(), "ENTRIES", "BYTES"), rows, numbers={"ENTRIES", "BYTES"})
    print_rest(len(children) - limit, "element")
