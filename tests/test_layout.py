"""The house: files that one can read, no circle of imports, few levels."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import casnap
from casnap import extending, serving, storage
from casnap.backends import local_files
from casnap.runtime.threads import python_gc_paused
from casnap.storage import inspecting
from tools.commits import faults_of
from tools.waist import DOOR, taken_by_guests

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path
    for folder in ("casnap", "tests", "tools")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
MOST_LEVELS = 10
MOST_NAMES, MOST_ASKING = 40, 8


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a tree, also those within others; their expressions are many more."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for inner in getattr(tree, field, ()):
            yield inner
            yield from statements(inner)


def tree_of(path: Path) -> ast.Module:
    """Parse a file. Trees are not kept: with all of them, each collection of garbage takes long."""
    with python_gc_paused():
        return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES if path.is_relative_to(ROOT / "casnap")}
# `python -m casnap`: one line above all, which runs the command.
del MODULES["casnap.__main__"]


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules of casnap that a module imports, at its top or within a function."""
    typing_only = {
        inner
        for node in statements(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in statements(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in MODULES or node.module in MODULES:
                    yield name if name in MODULES else node.module


@functools.cache
def graph() -> dict[str, set[str]]:
    """Return what each module imports; the package itself, which all import, is left out."""
    return {
        module: set(imported(tree_of(path))) - {"casnap", module}
        for module, path in MODULES.items()
    }


def levels(edges: dict[str, set[str]]) -> dict[str, int]:
    """Return how many imports lie below each node; raises ``CycleError`` for a circle."""
    found: dict[str, int] = {}
    for node in TopologicalSorter(edges).static_order():
        found[node] = 1 + max((found[below] for below in edges.get(node, ())), default=0)
    return found


@functools.cache
def bound_in(module: str) -> set[str]:
    """Return the names that the statements of a module bind, wherever they stand."""
    names: set[str] = set()
    for node in statements(tree_of(MODULES[module])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
    return names


def test_names_that_are_imported_exist() -> None:
    """Also in what this machine does not run: tests on a GPU, and the bench."""
    missing = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for path in SOURCES
        for node in statements(tree_of(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "casnap"
        for alias in node.names
        if f"{node.module}.{alias.name}" not in MODULES
        if node.module not in MODULES or alias.name not in bound_in(node.module)
    ]
    assert not missing


def test_modules_import_in_no_circle() -> None:
    levels(graph())


def test_folders_import_in_no_circle_and_few_levels() -> None:
    def room(module: str) -> str:
        return ".".join(module.split(".")[:2])

    edges: dict[str, set[str]] = {}
    for module, below in graph().items():
        edges.setdefault(room(module), set()).update(map(room, below))
    for name, below in edges.items():
        below.discard(name)
    assert max(levels(edges).values()) <= MOST_LEVELS


def test_each_folder_says_what_it_may_import_and_where_to_begin() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    for path in SOURCES:
        if path.is_relative_to(ROOT / "casnap") and path.name == "__init__.py":
            if path.parent == ROOT / "casnap":
                continue
            said = ast.get_docstring(tree_of(path)) or ""
            assert re.search(r"[Ii]mport", said), path
            begins = re.search(r"[Bb]egin\s+with\s+``([\w/]+\.py)``", said)
            assert begins, path
            first = (path.parent / begins[1]).relative_to(ROOT / "casnap")
            assert f"| `{first}` |" in page, first


MOST_AT_THE_DOOR = 60


def test_guests_come_in_by_the_door() -> None:
    """import-linter does not look at what is imported for type checkers alone."""
    taken = taken_by_guests(ROOT)
    at_the_door = {name for giver, name in taken if giver == DOOR}
    assert at_the_door == set(extending.__all__)
    assert len(at_the_door) <= MOST_AT_THE_DOOR
    assert {giver for giver, _ in taken} == {DOOR}


@pytest.mark.parametrize("module", [casnap, storage, inspecting, extending, local_files, serving])
def test_names_are_imported_later_from_where_type_checkers_find_them(module: ModuleType) -> None:
    assert module.__file__ is not None
    typed = {
        alias.name: node.module
        for node in ast.walk(tree_of(Path(module.__file__)))
        if isinstance(node, ast.ImportFrom) and node.col_offset
        for alias in node.names
    }
    assert typed.keys() <= set(module.__all__)
    for name, giver in typed.items():
        assert getattr(module, name) is getattr(importlib.import_module(str(giver)), name)
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = module.absent


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_house_is_drawn_as_the_layers_are(page: str) -> None:
    drawings = (ROOT / page).read_text().split("```text\n")
    drawing = next(each.split("```")[0] for each in drawings if each.lstrip().startswith("cli/"))
    layers = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert layers is not None
    assert re.findall(r"(\w+)(?:/|\.py)", drawing) == re.findall(r"\w+", layers[1])


def test_the_face_of_the_storage_is_small() -> None:
    """Others see the storage by its face. A new name takes the place of another one."""
    assert len(storage.__all__) <= MOST_NAMES
    for name in (*storage.__all__, *inspecting.__all__):
        assert getattr(storage, name, None) or getattr(inspecting, name)


def test_few_ask_whether_a_place_is_remote() -> None:
    """What differs is a number of `Costs`, or the lookup."""
    asking = {
        name
        for name, path in MODULES.items()
        if not name.startswith("casnap.backends") and "costly_requests" in path.read_text()
    }
    assert len(asking) <= MOST_ASKING, asking


_FROM_A_TEST = re.compile(r"from tests\.([\w.]*\btest_|[\w.]+ import (\([^)]*|.*)\btest_)")


def test_no_test_imports_from_another() -> None:
    """What tests share stands in tests/support."""
    for path in SOURCES:
        if not _FROM_A_TEST.search(path.read_text()):
            continue  # to parse all of them takes seconds
        for node in statements(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
                assert not any(name.startswith("test_") for name in names), path


def test_no_alias_of_a_type_is_a_text() -> None:
    """`Alias | None` in the signature of a public function would be no type."""
    for path in MODULES.values():
        for node in statements(tree_of(path)):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
                assert not isinstance(node.value, ast.Constant), f"{path}:{node.lineno}"


_FLOORS = ("casnap.format", "casnap.backends", "casnap.storage")
# "follow" alone is a word of POSIX (O_NOFOLLOW), and of what comes after something.
_GUEST = re.compile("follower|mirror|vllm|sglang|trainer|lightning|transformers", re.IGNORECASE)
_MAY_NAME_A_GUEST = {
    # A key of the format. Who never loads the mirror must not prune what it holds either.
    'casnap.format.records: HOLDING_NOTES = {"unmirrored": "not mirrored yet"}',
}


def test_the_floors_below_know_no_guest() -> None:
    """What a guest needs from them is an argument, or a name that says what it means there."""
    named = {
        f"{name}: {line.strip()}"
        for name, path in MODULES.items()
        if name.startswith(_FLOORS)
        for line in path.read_text().splitlines()
        if _GUEST.search(line)
    }
    assert named == _MAY_NAME_A_GUEST


_LOOK = re.compile(
    r"os\.path\.(exists|lexists|isfile|isdir|islink)\(|\.(exists|is_file|is_dir|is_symlink)\(\)|glob\("
)
# These own what they look at: the caches of this host, where each failure is a miss.
_LOOKS_ITSELF = {
    "casnap.backends.local_files.local_paths",
    "casnap.backends.local_files.safe_paths",
    "casnap.backends.remote.gcs_credentials",
    "casnap.storage.reading.chunk_cache",
    "casnap.storage.lookup.index_cache",
    "casnap.runtime.git_commit",
    "casnap.storage.lookup.lmdb_files",
}


def test_what_a_shell_reads_is_quoted() -> None:
    """A command in a message is copied into a shell: what a path has there must be one word."""
    word = r"\{shell_word\((?:f'[^']*'|[^()]*)\)\}"
    bare = re.compile(rf"`casnap [a-z]+ (?:[^`{{]|{word})*\{{(?!shell_word\(|ours\}})")
    commands = {
        f"{name}: {line.strip()}"
        for name, path in MODULES.items()
        for line in path.read_text().splitlines()
        if bare.search(line)
    }
    # There the word was made above.
    assert {command.split(":")[0] for command in commands} == {
        "casnap.storage.collecting.gc",
        "casnap.storage.opening.foreign_checkpoints",
        "casnap.view",
    }


def test_places_are_looked_at_by_one_module() -> None:
    """Those of the standard library say "no" where they could not look."""
    looks = {
        f"{name}:{number}: {line.strip()}"
        for name, path in MODULES.items()
        if name not in _LOOKS_ITSELF
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _LOOK.search(line) and "staged" not in line
    }
    assert looks == set()


def test_records_are_unpacked_by_one_function() -> None:
    """Iterators that keep a view in use crash Python before 3.12.4 if an error keeps them."""
    keeps = re.compile(r"iter_unpack|PickleBuffer")
    users = {name for name, path in MODULES.items() if keeps.search(path.read_text())}
    assert users == {"casnap.format.decoding"}


def test_what_is_opened_has_an_owner() -> None:
    """An interrupt leaves a file open whose number is nowhere yet."""
    bare = re.compile(r"os\.(open|dup|pipe2?|memfd_create|eventfd|fdopen|openpty)\(")
    assert {name for name, path in MODULES.items() if bare.search(path.read_text())} == set()


@pytest.mark.parametrize(
    ("subject", "faults"),
    [
        ("backends: a name that comes late is waited for", 0),
        ("docs, cli: one word for a snapshot that was thinned", 0),
        ("A sentence that names no area", 1),
        (f"take: {'x' * 67}", 1),
        (f"A sentence that names no area {'x' * 60}", 2),
    ],
)
def test_a_subject_names_its_area(subject: str, faults: int) -> None:
    assert len([*faults_of(subject)]) == faults


def test_tables_are_read_so_that_another_host_may_collect_meanwhile() -> None:
    """``read_at_newest`` and ``read_table`` read again what a collector has moved, or deleted."""
    unguarded = re.compile(r"\.table\([\w.]+\.(newest|recent)\(\)\)")
    assert [name for name, path in MODULES.items() if unguarded.search(path.read_text())] == []
