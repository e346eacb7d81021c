"""What the rooms of casnap know of each other: ``python -m tools.waist [CHECKOUT]``.

Counted: the names of the storage's face; those that modules outside import past it, from the rooms,
with `casnap.maintenance` apart; who reaches through a repository to its index; and who asks whether
a place is remote. Then the names that guests (`integrations/`, `report/`) import at their door,
which is `casnap.extending`, and from inside casnap; and those that each verb imports from below.
`integrations/dcp/` and `integrations/folders/` are no guests, but verbs.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import click

GUESTS = (Path("integrations"), Path("proving"), Path("report"))
# Those of the contract `verbs`.
VERBS = (
    *map(Path, ("cli", "files", "mirror", "serving", "transfer")),
    *(Path("integrations", name) for name in ("dcp", "folders")),
)
FACE, INSPECTING = "casnap.storage", "casnap.storage.inspecting"
DOOR, PUBLIC = "casnap.extending", ("casnap.errors",)


_REACH = re.compile(r"(?:store|repository|source)\.index\.\w+")


@click.command(help=__doc__)
@click.argument("checkout", default=".", type=click.Path(path_type=Path, exists=True))
@click.option("--names", is_flag=True, help="List the names, with how many modules import each.")
def main(checkout: Path, names: bool) -> None:
    """Print the counts."""
    users: dict[tuple[str, str], set[Path]] = defaultdict(set)
    asks: dict[Path, int] = {}
    reaches = 0
    for path in sorted((checkout / "casnap").rglob("*.py")):
        text = path.read_text()
        module = path.relative_to(checkout / "casnap")
        if module.parts[0] != "backends" and (count := text.count("costly_requests")):
            asks[module] = count
        if module.parts[0] == "storage":
            continue
        reaches += len(_REACH.findall(text))
        for node in ast.walk(ast.parse(text, path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "casnap.storage"
            ):
                for alias in node.names:
                    users[node.module or "", alias.name].add(module)
    faces = {face: names_of(checkout, face) for face in (FACE, INSPECTING)}
    print(f"face: {len(faces[FACE])} names; {len(faces[INSPECTING])} more for check and repair")
    for title, is_counted in (("maintenance", True), ("all others", False)):
        inside = {
            (giver, name)
            for (giver, name), modules in users.items()
            if giver not in faces
            and any((module.parts[0] == "maintenance") == is_counted for module in modules)
        }
        givers = {giver for giver, _ in inside}
        print(f"{title}: {len(inside)} names past the face, of {len(givers)} modules")
    print(f"{reaches} times a repository is reached through, to its index")
    print(
        f"{sum(asks.values())} times in {len(asks)} modules it is asked whether a place is remote"
    )
    taken = taken_by_guests(checkout)
    inside_names = [giver for giver, _ in taken if giver != DOOR]
    print(
        f"guests: {len(taken) - len(inside_names)} names at the door; {len(inside_names)} of "
        f"{len(set(inside_names))} modules inside"
    )
    tell_of_verbs(checkout)
    if names:
        for (giver, name), modules in sorted((users | taken).items()):
            print(f"{len(modules):3} {giver}.{name}")


def tell_of_verbs(checkout: Path) -> None:
    """Print how many names each verb imports from below."""
    for verb in VERBS:
        below = taken_in(checkout, verb, {"errors", "extending"})
        print(f"{verb}: {len(below)} names of {len({giver for giver, _ in below})} modules below")


def names_of(checkout: Path, face: str) -> set[str]:
    """Return the names that a module of the storage passes on."""
    path = checkout / Path(*face.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        return set()
    return {
        alias.name
        for node in ast.walk(ast.parse(path.read_text(), path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{FACE}.")
        for alias in node.names
    }


def taken_by_guests(checkout: Path) -> dict[tuple[str, str], set[Path]]:
    """Return who imports which name, of which module, but for what is public besides the door."""
    taken: dict[tuple[str, str], set[Path]] = defaultdict(set)
    for room in GUESTS:
        own = {*(guest.parts[0] for guest in GUESTS), "errors"}
        for name, modules in taken_in(checkout, room, own).items():
            guests = {each for each in modules if not any(map(each.is_relative_to, VERBS))}
            if guests:
                taken[name] |= guests
    return taken


def taken_in(checkout: Path, room: Path, but: Collection[str]) -> dict[tuple[str, str], set[Path]]:
    """Return who of a room imports which name of casnap from where.

    Args:
        checkout: The checkout.
        room: The folder, in ``casnap/``.
        but: The rooms whose names do not count, besides the room itself and what is public.
    """
    taken: dict[tuple[str, str], set[Path]] = defaultdict(set)
    for path in sorted((checkout / "casnap" / room).rglob("*.py")):
        module = path.relative_to(checkout / "casnap")
        for node in ast.walk(ast.parse(path.read_text(), path)):
            package, giver, *_ = [*(getattr(node, "module", None) or "").split("."), "", ""]
            own = {"", room.parts[0], *but}
            if isinstance(node, ast.ImportFrom) and package == "casnap" and giver not in own:
                for alias in node.names:
                    taken[node.module or "", alias.name].add(module)
    return taken


if __name__ == "__main__":
    main()
