"""Each command, each option and each public name says what it is."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import casnap
from casnap.cli import COMMANDS, cli
from tests.support import frameworks, trainer_contract
from tests.support.stand_ins import trainers_stood_in
from tools import commands_page

ROOT = Path(__file__).parent.parent
# All but the page of all commands, which is made from them.
PAGES = [ROOT / "README.md", *sorted({*ROOT.glob("docs/**/*.md")} - {commands_page.PAGE})]
DOCS = "\n".join(page.read_text() for page in PAGES)
MODULES = (
    "casnap",
    "casnap.errors",
    "casnap.extending",
    "casnap.integrations.dcp",
    "casnap.integrations.folders",
    "casnap.serving",
)
# What only casnap makes; users get it.
MADE_BY_CASNAP = {"casnap.PendingSnapshot"}
ELSEWHERE = re.compile(r":(meth|class|func):`|like ``")


def is_own(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("casnap")


def public_names() -> Iterator[tuple[str, Any]]:
    with trainers_stood_in() as integrations:
        modules = [*map(importlib.import_module, MODULES), *integrations]
    for module in modules:
        for exported in getattr(module, "__all__", vars(module)):
            value = getattr(module, exported)
            is_callable = inspect.isclass(value) or inspect.isfunction(value)
            if is_callable and is_own(value) and not exported.startswith("_"):
                yield f"{module.__name__}.{exported}", value


def functions() -> Iterator[tuple[str, Any, str]]:
    """Yield each public function and method, with the text that describes its arguments."""
    for name, value in public_names():
        if inspect.isfunction(value):
            yield name, value, inspect.getdoc(value) or ""
            continue
        bases = [kind for kind in value.__mro__ if is_own(kind)]
        made_by_users = name not in MADE_BY_CASNAP and not issubclass(value, Exception)
        if made_by_users and any("__init__" in vars(kind) for kind in bases):
            yield name, value.__init__, "\n".join(inspect.getdoc(kind) or "" for kind in bases)
        foreign = {n for kind in value.__mro__ if not is_own(kind) for n in vars(kind)}
        for method, member in inspect.getmembers(value, inspect.isroutine):
            if is_own(member) and not method.startswith("_") and method not in foreign:
                yield f"{name}.{method}", member, inspect.getdoc(member) or ""


def test_public_names_have_a_docstring() -> None:
    names = dict(public_names())
    assert len(names) > 50
    assert [name for name, value in names.items() if not inspect.getdoc(value)] == []


def unsaid(function: Any, text: str) -> set[str]:
    """Return the parameters that a text leaves out."""
    parameters = set(inspect.signature(function).parameters) - {"self", "cls", "args", "kwargs"}
    found = {p for p in parameters if not re.search(rf"^\s+{p}\b.*:", text, re.MULTILINE)}
    if found == parameters and (len(found) <= 2 or ELSEWHERE.search(text)):
        return set()
    return found


def test_arguments_are_described() -> None:
    """But for one or two that the first line tells of, and where the text names another place."""
    left_out = {name: unsaid(function, text) for name, function, text in functions()}
    assert len(left_out) > 100
    assert {name: found for name, found in left_out.items() if found} == {}


def test_commands_and_options_are_described() -> None:
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert command.help, name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"casnap {name} {parameter.opts[0]}"
        assert re.search(rf"casnap {name}\b", DOCS), f"no page of the docs shows casnap {name}"


def test_the_page_of_commands_is_what_they_print() -> None:
    assert commands_page.PAGE.read_text() == commands_page.page(), (
        "the commands have changed: python -m tools.commands_page writes the page anew"
    )


def test_the_names_of_the_package_are_in_the_docs() -> None:
    assert [n for n in casnap.__all__ if not re.search(rf"\b{n}\b", DOCS)] == []


def test_the_table_of_frameworks_is_filled_from_tests() -> None:
    """``python -m tests.support.frameworks`` prints it."""
    assert frameworks.table() in (ROOT / "docs/compatibility.md").read_text()
    for framework, shown_by in frameworks.TESTS.items():
        for test in shown_by.values():
            file, _, name = test.partition("::")
            text = (ROOT / "tests/guests/integrations" / file).read_text()
            contract, _, inherited = name.rpartition(".")
            if contract:
                assert hasattr(getattr(trainer_contract, contract), inherited)
                assert re.search(r"^class \w+\((Run|Trainer)Contract\)", text, re.MULTILINE)
            else:
                assert f"def {name}(" in text, f"{framework}: there is no {test}"
