"""How much of the storage the rest of casnap knows: ``python -m tools.waist [CHECKOUT]``.

Counted: the names that modules outside `casnap.storage` import from it, the modules that give and
that take them, and who asks whether a place is remote.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import click


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
    takers = set[Path]().union(*users.values())
    singles = sum(len(modules) == 1 for modules in users.values())
    print(
        f"{len(users)} names of {len({giver for giver, _ in users})} modules, imported by "
        f"{len(takers)} modules; {singles} of them by one alone"
    )
    print(
        f"{sum(asks.values())} times in {len(asks)} modules it is asked whether a place is remote"
    )
    if names:
        for (giver, name), modules in sorted(users.items()):
            print(f"{len(modules):3} {giver}.{name}")


if __name__ == "__main__":
    main()
