"""How large the code is: modules, lines and lines of code of each folder.

    python -m tools.size [FOLDER]

Lines of code are those that hold a token which is no comment and no docstring.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import click

_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
_EMPTY = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def _docstrings(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that docstrings, and strings that stand alone, take."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def code_lines(text: str) -> int:
    """Return how many lines of a module hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _EMPTY:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstrings(ast.parse(text)))


@click.command(help=__doc__)
@click.argument("folder", default="casnap", type=_FOLDER)
def main(folder: Path) -> None:
    """Print the figures of the modules below a folder."""
    table: dict[str, Counter[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        figures = table.setdefault(str(path.relative_to(folder).parent), Counter())
        figures.update(modules=1, lines=text.count("\n"), code=code_lines(text))
    table["all"] = sum(table.values(), Counter())
    print(f"{'folder':<18}{'modules':>8}{'lines':>9}{'code':>9}")
    for room, figures in table.items():
        print(f"{room:<18}{figures['modules']:>8}{figures['lines']:>9,}{figures['code']:>9,}")


if __name__ == "__main__":
    main()
