"""Where things stand: what tests share is in tests/support, and nowhere twice."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def imported_modules(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_test_imports_from_another() -> None:
    for file in TESTS.rglob("*.py"):
        for name in imported_modules(file):
            parts = name.split(".")
            assert parts[0] != "tests" or not any(p.startswith("test_") for p in parts), (
                f"{file.relative_to(TESTS)} imports {name}; what tests share is in tests/support"
            )
