"""The environment of a take: what decides, besides the state, which bits a training computes.

It is a dict of short texts, by fixed keys. Some variables of the process's environment are in it,
under their own names: those that are known to change results. No others are read.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch

from casnap.runtime.environment import numeric_variables
from casnap.runtime.git_commit import commit_of_program
from casnap.version import __version__

_log = logging.getLogger("casnap")
# Keys that each process knows at once. Others are compared only if both sides have them, such as
# the device before its first use, a trainer that is imported later, or a key of a later version.
_ALWAYS = frozenset(
    {"python", "torch", "cuda", "cudnn", "hip", "casnap", "threads", "dtype", "autocast"}
    | {"tf32_matmul", "tf32_conv", "cudnn_benchmark", "cudnn_deterministic", "deterministic"}
)
# Keys that say nothing of the numbers that a training computes. Autocast is among them, since a
# restore mostly runs outside of its context.
_HARMLESS = frozenset({"casnap", "commit", "autocast"})
_COMMIT_DIGITS, _MOST_LETTERS = 10, 60
# The trainers that use casnap in this process, with their versions.
_trainers: dict[str, str] = {}


def name_trainer(package: str, version: str) -> None:
    """Note that a trainer uses casnap in this process. Later takes record its version.

    Args:
        package: The name of the trainer's package.
        version: Its version.
    """
    _trainers[package] = version


def run_environment(*, with_commit: bool) -> dict[str, str]:
    """Return the environment of this process and thread as it is now.

    ==========================  ==================================================================
    ``python``, ``torch``,      versions; ``cuda``, ``cudnn`` and ``hip`` if torch is built for it
    ``cuda``, ``cudnn``,
    ``hip``, ``casnap``
    a package                   the version of a trainer that uses casnap
    ``device``                  the name of the accelerator, or what the CPU can do; absent while an
                                accelerator is not in use yet
    ``threads``                 how many threads compute on the CPU
    ``dtype``                   the default dtype
    ``autocast``                the device types with autocast, and its dtype there; or ``off``
    ``tf32_matmul``,            ``on`` or ``off``
    ``tf32_conv``,
    ``cudnn_benchmark``,
    ``cudnn_deterministic``
    ``deterministic``           deterministic algorithms: ``on``, ``off`` or ``warn``
    ``commit``                  the git commit of the script's folder; with ``-dirty`` at the end if
                                tracked files have changed since
    a variable                  such as ``OMP_NUM_THREADS``: its value when this was first called
    ==========================  ==================================================================

    It is empty, with a warning, if something cannot be read, such as a setting in a new torch.

    Args:
        with_commit: Whether to ask git. With many ranks, one asks.
    """
    try:
        found = _found(with_commit=with_commit)
    except Exception as e:  # noqa: BLE001 - no take, and no restore, may fail for a note
        _warn_once(f"what this process runs with is not noted: {type(e).__name__}: {e}")
        return {}
    return {key: text for key, text in found.items() if text}


def _found(*, with_commit: bool) -> dict[str, str]:
    cudnn = torch.backends.cudnn
    return {
        **_of_process(),
        **_trainers,
        "threads": str(torch.get_num_threads()),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "autocast": _autocast(),
        "tf32_matmul": _tf32(torch.backends.cuda.matmul),
        "tf32_conv": _tf32(getattr(cudnn, "conv", cudnn)),
        "cudnn_benchmark": _on(cudnn.benchmark),
        "cudnn_deterministic": _on(cudnn.deterministic),
        "deterministic": _deterministic(),
        "device": _device(),
        "commit": commit_of_program() if with_commit else "",
    }


@cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


@cache
def _of_process() -> dict[str, str]:
    """Return the part of the environment that does not change while the process runs.

    It is computed once, at the first call. Later changes of environment variables are not seen;
    libraries do not see them either.
    """
    cudnn = ""
    if torch.version.cuda:
        cudnn = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "cudnn": cudnn,
        "hip": torch.version.hip or "",
        "casnap": __version__,
        **numeric_variables(),
    }


def _device() -> str:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _name_of(torch.cuda.current_device())
    if torch.version.cuda or torch.version.hip:
        return ""
    return f"CPU {torch.backends.cpu.get_cpu_capability()}"


@cache
def _name_of(device: int) -> str:
    return torch.cuda.get_device_name(device)


def _autocast() -> str:
    on = [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
    texts = [f"{k} {str(torch.get_autocast_dtype(k)).removeprefix('torch.')}" for k in on]
    return ", ".join(texts) or "off"


def _tf32(backend: object) -> str:
    # Of older versions of torch. Newer ones raise if a program has used both settings.
    precision = getattr(backend, "fp32_precision", None)
    if precision is None:
        return _on(getattr(backend, "allow_tf32", False))
    return _on(precision == "tf32")


def _deterministic() -> str:
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return "warn"
    return _on(torch.are_deterministic_algorithms_enabled())


def _on(flag: bool) -> str:
    return "on" if flag else "off"


class EnvironmentChange(NamedTuple):
    """How one part of the environment differs from that of a take.

    Attributes:
        text: The change in words, such as ``"torch 2.13.0 → 2.14.1"``.
        is_numeric: Whether a training may compute other numbers because of it.
    """

    text: str
    is_numeric: bool


def changes_since(
    before: Mapping[str, str], ranks_before: int, ranks: int, *, with_commit: bool
) -> list[EnvironmentChange]:
    """Return how the environment of this process differs from that of a take.

    If the take noted no environment, only the numbers of ranks are compared.

    Args:
        before: The environment of the take.
        ranks_before: How many ranks took.
        ranks: How many ranks there are now.
        with_commit: Whether to ask git, if the take has noted a commit.
    """
    now = run_environment(with_commit=with_commit and "commit" in before) if before else {}
    changes = []
    for key in dict.fromkeys((*before, *now)):
        was, is_now = before.get(key, ""), now.get(key, "")
        is_known = (was and is_now) or key in _ALWAYS or key.isupper()
        if was != is_now and is_known:
            text = f"{key} {_short(key, was)} → {_short(key, is_now)}"
            changes.append(EnvironmentChange(text, _is_numeric(key, now)))
    if ranks != ranks_before:
        changes.append(EnvironmentChange(f"{ranks_before} → {ranks} ranks", True))
    return changes


def _is_numeric(key: str, now: Mapping[str, str]) -> bool:
    if key == "threads":
        # Their number decides in which order a CPU adds up; a GPU hardly notices it.
        return now.get("device", "").startswith("CPU")
    return key not in _HARMLESS


def _short(key: str, text: str) -> str:
    if key == "commit":
        commit, dash, dirty = text.partition("-")
        return f"{commit[:_COMMIT_DIGITS]}{dash}{dirty}"
    return text[:_MOST_LETTERS] or "none"
