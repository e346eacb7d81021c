"""The tests of integrations with other versions of their frameworks.

    python -m tools.versions                     # oldest and newest: every environment of TESTED_IN
    python -m tools.versions trainers-oldest     # one of them
    python -m tools.versions trainers-oldest --with transformers==4.57.6
    python -m tools.versions --today             # the newest of everything, as of today
    python -m tools.versions trainers-oldest -- -k accelerate    # the rest is for pytest

Each environment lies over the packages of the one that runs this, in ``.venv/versions``, and is
kept. In the end it prints what passed with which versions, as docs/compatibility.md has it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from casnap.integrations.versions import TESTED
from tools import over_venv

ROOT = Path(__file__).resolve().parents[1]
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-warn-conflicts")
# No test needs the network; DeepSpeed is to compile nothing, and to look for no GPU.
_SETTINGS = {"HF_HUB_OFFLINE": "1", "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}


class Environment(NamedTuple):
    """An environment, and what is tested there.

    Attributes:
        packages: What pip installs. A package that is named here is not held by constraints.txt.
        tests: What pytest runs, and which marker it selects.
        options: Further options of pip.
        constrained: The packages of constraints.txt that are held; all by default.
    """

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()
    constrained: tuple[str, ...] | None = None


def oldest(*integrations: str) -> tuple[str, ...]:
    """Return the oldest version of each integration's package, as pip takes it."""
    return tuple(f"{TESTED[name].package}=={TESTED[name].oldest}" for name in integrations)


def newest(*integrations: str) -> tuple[str, ...]:
    """Return the newest version of each integration's package, as pip takes it."""
    return tuple(f"{TESTED[name].package}=={TESTED[name].newest}" for name in integrations)


def tests_of(*integrations: str) -> tuple[str, ...]:
    """Return what pytest is told to run the tests of some integrations."""
    files = (f"tests/guests/integrations/test_{name}.py" for name in integrations)
    return ("-m", "integrations", *files)


_TRAINERS = ("transformers", "accelerate", "lightning", "pytorch_lightning")
_TESTS_OF_TRAINERS = tests_of("transformers", "accelerate", "lightning")

TESTED_IN: Mapping[str, Environment] = {
    "trainers-oldest": Environment(
        # Each beside what was new then; Lightning 2.3 needs the pkg_resources of setuptools.
        (
            *oldest(*_TRAINERS),
            *("peft==0.15.2", "setuptools<81"),
            *("fsspec", "huggingface_hub", "packaging", "tokenizers"),
        ),
        _TESTS_OF_TRAINERS,
    ),
    "deepspeed-oldest": Environment(
        (*oldest("deepspeed"), "accelerate", "transformers"),
        tests_of("deepspeed", "trainers_deepspeed"),
        ("--no-build-isolation",),  # its build imports torch
    ),
    # It asks for a NumPy below 2.
    "megatron-oldest": Environment((*oldest("megatron"), "numpy"), tests_of("megatron")),
    "trainers-newest": Environment((*newest(*_TRAINERS), "peft"), _TESTS_OF_TRAINERS),
}
"""The oldest and the newest versions."""

TODAY: Mapping[str, Environment] = {
    "trainers-today": Environment(
        (*(TESTED[name].package for name in _TRAINERS), "peft"),
        _TESTS_OF_TRAINERS,
        ("--upgrade", "--upgrade-strategy", "eager", "--editable", ".[test]"),
        # Another torch from PyPI brings gigabytes for CUDA along.
        constrained=("torch",),
    ),
}
"""Today's newest of everything."""


def _name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _constraints(environment: Environment) -> str:
    own = {_name_of(package) for package in environment.packages}
    held = environment.constrained
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "".join(
        f"{line}\n"
        for line in lines
        if line and line[0] != "#" and (name := _name_of(line)) not in own
        if held is None or name in held
    )


def set_up(folder: Path, environment: Environment) -> Path:
    """Make an environment, unless it is there already; return its interpreter."""
    constraints = _constraints(environment)
    made_of = "\n".join([*environment.options, *environment.packages, constraints])
    stamp, python = folder / "made-of.txt", folder / "bin/python"
    if stamp.exists() and stamp.read_text() == made_of and "--upgrade" not in environment.options:
        return python
    over_venv.make(folder)
    (folder / "constraints.txt").write_text(constraints)
    command = [python, *_PIP, "-c", folder / "constraints.txt"]
    subprocess.run(
        [*command, *environment.options, *environment.packages],
        check=True,
        cwd=ROOT,
        env=os.environ | _SETTINGS,
    )
    stamp.write_text(made_of)
    return python


def _found(python: Path, environment: Environment) -> str:
    """Return the versions of what is tested there, as they are installed."""
    code = f"from tools.versions import print_versions; print_versions({environment.packages!r})"
    return subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()


def print_versions(packages: Sequence[str]) -> None:
    """Print the versions of torch and of the packages with an integration, those among some."""
    frameworks = {_name_of(tested.package) for tested in TESTED.values()} | {"peft"}
    names = [name for name in map(_name_of, packages) if name in frameworks]
    texts = [f"Python {sys.version_info.major}.{sys.version_info.minor}"]
    for name in ["torch", *names]:
        try:
            texts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            texts.append(f"{name} –")
    print(", ".join(texts))


def test(folder: Path, environment: Environment, options: Sequence[str]) -> tuple[int, str]:
    """Run the tests; return pytest's exit status, and a row for a table of what was tried."""
    python, began = set_up(folder, environment), time.monotonic()
    command = [python, "-m", "pytest", *environment.tests, *options]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | _SETTINGS, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip("= \n") or last
    seconds = time.monotonic() - began
    today = datetime.datetime.now(datetime.timezone.utc).date()
    counts = re.sub(r", \d+ (warnings?|deselected)| in .*", "", last)
    row = f"| {_found(python, environment)} | {today} | {counts} | {seconds / 60:.1f} min |"
    return process.returncode, row


def main() -> int:
    own, options = sys.argv[1:], list[str]()
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m tools.versions", description=__doc__.splitlines()[0]
    )
    every = {**TESTED_IN, **TODAY}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(every)}")
    parser.add_argument("--today", action="store_true", help="the newest of everything")
    parser.add_argument("--with", action="append", default=[], dest="others", metavar="PACKAGE")
    parser.add_argument("--into", type=Path, default=ROOT / ".venv/versions", metavar="DIR")
    arguments = parser.parse_args(own)
    if unknown := set(arguments.names) - set(every):
        parser.error(f"no environment is called {', '.join(sorted(unknown))}")
    rows, failed = [], []
    for name in arguments.names or (TODAY if arguments.today else TESTED_IN):
        others = {_name_of(package) for package in arguments.others}
        packages = (p for p in every[name].packages if _name_of(p) not in others)
        environment = every[name]._replace(packages=(*packages, *arguments.others))
        folder = arguments.into / "-with-".join([name, *arguments.others])
        status, row = test(folder, environment, options)
        rows.append(row)
        failed += [name] if status else []
    print("| versions | date | tests | |\n|---|---|---|---|", *rows, sep="\n")
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
