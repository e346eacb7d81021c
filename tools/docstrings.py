"""Docstrings that name what is not there: ``python -m tools.docstrings``, which `make check` runs.

Each name of an ``Args:`` section is a parameter, each of an ``Attributes:`` section a field, a
property or an attribute that a method sets.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_SECTION = re.compile(r"^(\w+):\n", re.MULTILINE)
_NAME = re.compile(r"^    \*{0,2}(\w+(?:, \*{0,2}\w+)*)(?: \(.*\))?:", re.MULTILINE)


def _named(node: ast.ClassDef | Function, section: str) -> set[str]:
    """Return the names of one section of a docstring."""
    parts = _SECTION.split(ast.get_docstring(node) or "")
    text = dict(zip(parts[1::2], parts[2::2], strict=True)).get(section, "")
    return {name.strip(" *") for line in _NAME.findall(text) for name in line.split(",")}


def _parameters(function: Function) -> set[str]:
    arguments = function.args
    starred = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    plain = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg for argument in (*plain, *starred)}


def _attributes(cls: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return what a class and its bases in the same module have."""
    names = set[str]()
    for base in cls.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            names |= _attributes(classes[base.id], classes)
    for node in ast.walk(cls):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, Function):
            names.add(node.name)
    return names


def stale_names(path: Path) -> Iterator[str]:
    """Yield a line for each name in the docstrings of a module that is not there."""
    tree = ast.parse(path.read_text(), path)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = {n.name: n for n in node.body if isinstance(n, Function)}
            attributes = _attributes(node, classes)
            init = methods.get("__init__")
            stale = {"Args": _named(node, "Args") - (_parameters(init) if init else attributes)}
            stale["Attributes"] = _named(node, "Attributes") - attributes
        elif isinstance(node, Function):
            # Of a function that takes ``**options``, a test of the public names checks them.
            parameters = _parameters(node) if node.args.kwarg is None else _named(node, "Args")
            stale = {"Args": _named(node, "Args") - parameters}
        else:
            continue
        for section, names in stale.items():
            for name in sorted(names):
                yield f"{path}:{node.lineno}: {section} of {node.name}: {name} is not there"


def main() -> int:
    """Print what is stale; return 1 if something is."""
    lines = [line for path in sorted(Path("casnap").rglob("*.py")) for line in stale_names(path)]
    for line in lines:
        print(line)
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
