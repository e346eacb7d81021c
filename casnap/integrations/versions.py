"""The versions of each framework with which its integration was tested: a table and its check.

If the installed version is known to fail, the import of the integration raises an error. For any
other version outside of the range, it warns once and goes on. ``pyproject.toml`` has the same
ranges, and ``docs/compatibility.md`` says what was run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import NamedTuple

from casnap.errors import pip_install
from casnap.extending import name_trainer

_log = logging.getLogger("casnap")


class Failing(NamedTuple):
    """Versions of a package that are known to fail.

    Attributes:
        first: The first failing version.
        below: The first version that works again; empty if there is none yet.
        why: What goes wrong.
        instead: The requirement to give to pip instead.
    """

    first: str
    below: str
    why: str
    instead: str


class Versions(NamedTuple):
    """The versions of a package that its integration was tested with.

    Attributes:
        package: The name of the package.
        oldest: The oldest version that was tested.
        newest: The newest version that was tested. Its later patch releases count as tested.
        failing: The versions that are known to fail, inside or outside of this range.
        last_of_majors: The newest version that was tested of each older major version.
    """

    package: str
    oldest: str
    newest: str
    failing: tuple[Failing, ...] = ()
    last_of_majors: tuple[str, ...] = ()

    def instead_of(self, installed: str) -> str:
        """Return the command that installs a tested version, of this major version if possible."""
        major = _release(installed)[0]
        same = [v for v in (*self.last_of_majors, self.newest) if _release(v)[0] == major]
        return f"pip install '{self.package}=={same[0] if same else self.newest}'"


TESTED: Mapping[str, Versions] = MappingProxyType(
    {
        "accelerate": Versions("accelerate", "1.2.1", "1.15.0"),
        "deepspeed": Versions("deepspeed", "0.16.9", "0.19.8"),
        "lightning": Versions("lightning", "2.3.3", "2.6.6"),
        "megatron": Versions("megatron-core", "0.13.1", "0.16.1"),
        "pytorch_lightning": Versions("pytorch-lightning", "2.3.3", "2.6.6"),
        "torch_checkpointing": Versions("torch_checkpointing", "0.1.0", "0.1.1"),
        "torchtitan": Versions(
            "torchtitan",
            "0.3.0",
            "0.3.0",
            (
                Failing(
                    "0",
                    "0.3.0",
                    "its Trainer takes no other CheckpointManager. Its own one works after "
                    "casnap.integrations.dcp.install(folder, dcp_files=True)",
                    "torchtitan>=0.3.0",
                ),
            ),
        ),
        "transformers": Versions("transformers", "4.51.3", "5.24.0", last_of_majors=("4.57.6",)),
    }
)
"""Integration → versions. The integration's name is that of its module, and of an extra."""


def check_version(integration: str, tested: Versions | None = None) -> None:
    """Check that the package of an integration is installed, in a version that may work.

    Args:
        integration: The name of the integration, as in `TESTED`.
        tested: Its versions; by default those of `TESTED`.

    Raises:
        ImportError: The package is not installed, or its version is known to fail; the message says
            what to install.
    """
    tested = tested or TESTED[integration]
    package, oldest, newest, failing, _ = tested
    module = f"casnap.integrations.{integration}"
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise ImportError(
            f"{module} needs {package}, which is not installed: {pip_install(integration)}",
            name=package,
        ) from None
    name_trainer(package, installed)
    found = _release(installed)
    for fails in failing:
        if _release(fails.first) <= found and (not fails.below or found < _release(fails.below)):
            raise ImportError(
                f"{module} does not work with {package} {installed}: {fails.why}. "
                f"Run: pip install '{fails.instead}'",
                name=package,
            )
    is_newer = found[:2] > _release(newest)[:2]
    if is_newer or found < _release(oldest):
        range_ = oldest if oldest == newest else f"{oldest} to {newest}"
        _warn_once(
            f"{module} was tested with {package} {range_}, and this is "
            f"{'a newer' if is_newer else 'an older'} one, {installed}. It goes on; let a short "
            "run save and resume before you rely on it"
            + f", or run: {tested.instead_of(installed)}"
            * (not is_newer)
        )


def check_methods(
    integration: str, kind: type, methods: Iterable[str], tested: Versions | None = None
) -> None:
    """Check that a class of the framework has the methods that an integration overrides.

    A method that has another name now would never be called, and nothing would be saved.

    Args:
        integration: The name of the integration, as in `TESTED`.
        kind: The class.
        methods: The names of the methods.
        tested: The integration's versions; by default those of `TESTED`.

    Raises:
        ImportError: The class lacks a method; the message says what to install.
    """
    if lacking := [name for name in methods if not hasattr(kind, name)]:
        tested = tested or TESTED[integration]
        package, installed = tested.package, version(tested.package)
        raise ImportError(
            f"casnap.integrations.{integration} does not work with {package} {installed}: "
            f"its {kind.__name__} has no {', '.join(lacking)}. It was tested with {tested.oldest} "
            f"to {tested.newest}. Run: {tested.instead_of(installed)}",
            name=package,
        )


@cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what comes after them (``rc1``, ``+cpu``)."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    return (*numbers, 0, 0, 0)[: max(3, len(numbers))]
