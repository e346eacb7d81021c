"""What the rooms of casnap know of each other: ``python -m tools.waist [CHECKOUT]``.

Counted: the names that modules outside `casnap.storage` import from it, the modules that they come
from and go to, those of `casnap.maintenance` apart, and who asks whether a place is remote. Then
the names that guests (`serving/`, `integrations/`, `report/`) import at their door, which is
`casnap.extending`, and from inside casnap.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import click

GUESTS = ("serving", "integrations", "report")
DOOR, PUBLIC = "casnap.extending", ("casnap.errors",)


@click.command(help=__doc__)
@click.argument("checkout", default=".", type=click.Path(path_type=Path, exists=True))
@click.option("--names", is_flag=True, help="List the names, with how many modules import each.")
def main(checkout: Path, names: bool) -> None:
    """Print the counts."""
    users: dict[tuple[str, str], set[Path]] = defaultdict(set)
    asks: dict[Path, int] = {}
    for path in sorted((checkout / "casnap").rglob("*.py")):
        text = path.read_text()
        module = path.relative_to(checkout / "casnap")
        if module.parts[0] != "backends" and (count := text.count("costly_requests")):
            asks[module] = count
        if module.parts[0] == "storage":
            continue
        for node in ast.walk(ast.parse(text, path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "casnap.storage"
            ):
                for alias in node.names:
                    users[node.module or "", alias.name].add(module)
    inside = {module for module in set[Path]().union(*users.values()) if _is_inside(module)}
    for title, is_counted in (("maintenance", True), ("all others", False)):
        counted = {
            name: chosen
            for name, modules in users.items()
            if (chosen := modules & inside if is_counted else modules - inside)
        }
        takers = set[Path]().union(*counted.values())
        singles = sum(len(modules) == 1 for modules in counted.values())
        print(
            f"{title}: {len(counted)} names of {len({giver for giver, _ in counted})} modules, "
            f"imported by {len(takers)} modules; {singles} of them by one alone"
        )
    print(
        f"{sum(asks.values())} times in {len(asks)} modules it is asked whether a place is remote"
    )
    taken = taken_by_guests(checkout)
    inside_names = [giver for giver, _ in taken if giver != DOOR]
    print(
        f"guests: {len(taken) - len(inside_names)} names at the door; {len(inside_names)} of "
        f"{len(set(inside_names))} modules inside"
    )
    if names:
        for (giver, name), modules in sorted((users | taken).items()):
            print(f"{len(modules):3} {giver}.{name}")


def taken_by_guests(checkout: Path) -> dict[tuple[str, str], set[Path]]:
    """Return who imports which name, of which module, but for what is public besides the door."""
    taken: dict[tuple[str, str], set[Path]] = defaultdict(set)
    for room in GUESTS:
        for path in sorted((checkout / "casnap" / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(), path)):
                if not isinstance(node, ast.ImportFrom) or node.module in PUBLIC:
                    continue
                package, room_of_giver, *_ = [*(node.module or "").split("."), "", ""]
                if package == "casnap" and room_of_giver not in ("", *GUESTS):
                    for alias in node.names:
                        taken[node.module or "", alias.name].add(
                            path.relative_to(checkout / "casnap")
                        )
    return taken


def _is_inside(module: Path) -> bool:
    return module.parts[0] == "maintenance"


if __name__ == "__main__":
    main()
