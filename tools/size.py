"""How large the code is: lines, lines of code, modules of each folder, and names that say little.

    python -m tools.size [folder]

Lines of code are those that hold a token which is no comment and no docstring. A name says little
if it is a participle, an adverb or a question word alone: ``found``, ``told``, ``what``, ``own``. A
function that is called ``read``, ``put`` or ``tell`` is named by a verb.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

_SAY_LITTLE = frozenset(
    """
    above added ahead alone apart asked away back begun behind below beside built called came
    chosen closed come copied counted cut done ended even far filled first found given gone
    heard held here how judged kept known last late left little located lost made many marked
    meant met missing moved much named needed new next none noted old once opened other own past
    pinned plain proven pruned put read relied removed rest said same seen sent shown still
    stored such taken tagged tell then there tied told too took tried under untagged used waited
    wanted what when where whether which whole why written
    """.split()  # noqa: SIM905
)
_VERBS = {"put", "read", "tell"}
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


def names_that_say_little(text: str) -> Counter[str]:
    """Return the names which a module gives to things that say little, and how often it does."""
    names: Counter[str] = Counter()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] += node.name.strip("_") not in _VERBS
        elif isinstance(node, ast.arg):
            names[node.arg] += 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] += 1
    return Counter({name: n for name, n in names.items() if n and name.strip("_") in _SAY_LITTLE})


def main(root: Path) -> None:
    """Print the figures of the modules below a folder."""
    table: dict[str, Counter[str]] = {}
    names: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        room = path.relative_to(root).parent
        figures = table.setdefault(str(room), Counter())
        figures.update(modules=1, lines=text.count("\n"), code=code_lines(text))
        names += names_that_say_little(text)
    table["all"] = sum(table.values(), Counter())
    print(f"{'folder':<18}{'modules':>8}{'lines':>9}{'code':>9}")
    for room, figures in table.items():
        print(f"{room:<18}{figures['modules']:>8}{figures['lines']:>9,}{figures['code']:>9,}")
    common = ", ".join(f"{name} {n}" for name, n in names.most_common(8))
    print(f"{names.total():,} names say little: {common}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "casnap"))
