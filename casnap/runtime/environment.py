"""The one module that reads casnap's environment: variables, and the folders of the user."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from casnap.errors import InvalidNameError, StoreError, with_article
from casnap.runtime.file_systems import shared_type
from casnap.runtime.units import parsed_size

_log = logging.getLogger("casnap")
# The variables that are known to change which bits a training computes.
_NUMERIC = (
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "DNNL_DEFAULT_FPMATH_MODE",
    "FLASH_ATTENTION_DETERMINISTIC",
    "MIOPEN_FIND_MODE",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
)
_MOST_LETTERS = 100
# The URI of a local file: its host and path, or its path alone.
_FILE_URI = re.compile(r"(?i:file):(?://([^/]*)(/.*)?|(/.*))", re.DOTALL)


def given_path(path: object) -> str:
    """Return a path or URI that a user gave, as a str.

    Each path or URI from an argument must go through this function before any other use.

    Raises:
        TypeError: The path is neither a str nor a path-like object of a str.
        InvalidNameError: The path is empty, or has a NUL character.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(
            "a path is a str or a path-like of one, or a URI, such as 's3://bucket/run1'; got "
            f"{with_article(type(path).__name__)}"
        )
    if not text:
        raise InvalidNameError("an empty path names nothing; for the current folder write '.'")
    if "\0" in text:
        raise InvalidNameError(f"{text!r:.500} is no path: no file name has a NUL")
    return str(text)


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the local path that a user gave as a path, with ``~``, or as a ``file:`` URI.

    Each path from an argument must go through this function before any file is looked at. The URI
    of a remote place stays as it is.

    Raises:
        TypeError: The path is neither a str nor a path-like object of a str.
        InvalidNameError: The URI names another host, has no path, or has a ``%`` escape, which
            programs read in two ways. Or the path has a character that no file name can have here.
    """
    text = given_path(path)
    try:
        os.fsencode(text)
    except UnicodeEncodeError as e:
        raise InvalidNameError(f"{text!r:.500}: no file name here has such a character: {e}") from e
    uri = _FILE_URI.fullmatch(text)
    if uri is None:
        return os.path.expanduser(text)  # noqa: PTH111 - a Path has no slash at its end
    host, path_of_uri = uri[1] or "", uri[2] or uri[3]
    if host.lower() not in ("", "localhost"):
        raise InvalidNameError(
            f"{text!r:.500} names a file of the host {host!r:.80}; one of this machine has three "
            "slashes, file:///home/me/ckpts, or is a path alone"
        )
    if path_of_uri is None:
        raise InvalidNameError(f"{text!r} names nothing; write file:///home/me/ckpts, or a path")
    if escape := re.search("%[0-9a-fA-F]{2}", path_of_uri):
        # Python's as_uri() writes a space as %20; fsspec reads %20 as a name with a percent sign.
        raise InvalidNameError(
            f"{text!r:.500}: some programs take {escape[0]} in a URI for a character, others as it "
            "stands; give the path alone, as it is on the disk, without file://"
        )
    return f"/{path_of_uri.lstrip('/')}"


def is_file_uri(text: str) -> bool:
    """Whether a text is the URI of a local file."""
    return _FILE_URI.fullmatch(text) is not None


def cache_folder() -> Path | None:
    """Return the folder for host-local caches; None if no candidate can be used.

    The first candidate is ``CASNAP_CACHE_DIR``. If this variable is not set, the first candidate is
    ``$XDG_CACHE_HOME/casnap`` (``~/.cache/casnap``). The second candidate is a private folder in
    the temp folder. A candidate cannot be used if this process cannot write there, if it belongs to
    another user, or if it is on a network file system or one of an unknown type, where LMDB may not
    work.
    """
    for folder in _cache_candidates():
        # Another process may delete the folder between these calls.
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if why_refused(folder) is None and os.access(folder, os.W_OK):
                return folder
    return None


def folder_for_chunks(name: str) -> Path | None:
    """Return the folder for a read cache, and create it.

    Args:
        name: The name of the folder below ``CASNAP_CACHE_DIR``, or else below :func:`cache_folder`.

    Returns:
        The folder; None, with a warning, if this process can write to no such folder.

    Raises:
        StoreError: The folder belongs to another user, or is on a network file system.
    """
    setting = os.environ.get("CASNAP_CACHE_DIR")
    folder = Path(local_path(setting)) if setting else cache_folder()
    reason = None
    with suppress(OSError):
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            reason = why_refused(folder)
            if reason is None and os.access(folder, os.W_OK):
                folder /= name
                folder.mkdir(mode=0o700, exist_ok=True)
                # In a folder that all may write, another user may have made it, or a link.
                reason = why_refused(folder)
                if reason is None:
                    return folder
    if reason is not None:
        raise StoreError(
            f"the read cache cannot be in {folder}: it {reason}. Set CASNAP_CACHE_DIR to a folder "
            "of your own on a disk of this host, or do without the cache (cache_bytes=0)"
        )
    _log.warning(
        "%s cannot be written, so there is no read cache", folder or "no folder for the cache"
    )
    return None


def cache_bytes_asked() -> int:
    """Return how many bytes of chunks to cache, as ``CASNAP_CACHE_BYTES`` says; 0 by default.

    Raises:
        StoreError: The value of the variable is not a number of bytes.
    """
    text = os.environ.get(variable := "CASNAP_CACHE_BYTES", "").strip()
    nbytes = parsed_size(text) if text else 0
    if nbytes is None:
        kind = "a number of bytes, such as 50GB, 46GiB or 50000000000"
        raise StoreError(f"{variable} is {text!r}; set it to {kind}")
    return nbytes


def threads_asked() -> int | None:
    """Return how many threads a take may use, as ``CASNAP_THREADS`` says; None by default.

    Raises:
        StoreError: The value of the variable is not a number of threads.
    """
    count = _number_asked("CASNAP_THREADS", kind := "a number of threads, such as 4")
    if count == 0:
        raise StoreError(f"CASNAP_THREADS is '0'; set it to {kind}")
    return count


OnUnhealthy = Literal["warn", "raise"]
"""What a take does if a tensor is unhealthy."""


def health_asked() -> OnUnhealthy | None:
    """Return how takes measure tensors, as ``CASNAP_HEALTH`` says; None, the default: not at all.

    Raises:
        StoreError: The variable has another value than "off", "warn" or "raise".
    """
    match os.environ.get("CASNAP_HEALTH", "").strip():
        case "warn":
            return "warn"
        case "raise":
            return "raise"
        case "" | "off":
            return None
        case word:
            raise StoreError(f"CASNAP_HEALTH is {word!r:.80}; set it to warn, raise or off")


def obeys_health() -> bool:
    """Whether trainers pass over unhealthy snapshots: ``CASNAP_HEALTH`` is not "off"."""
    return os.environ.get("CASNAP_HEALTH", "").strip() != "off"


def collects_by_itself() -> bool:
    """Whether this process may collect garbage by itself: ``CASNAP_GC`` is not "off"."""
    return os.environ.get("CASNAP_GC") != "off"


def hashes_on_device() -> bool:
    """Whether a device may hash its tensors: ``CASNAP_DEVICE_HASH`` is not "off"."""
    return os.environ.get("CASNAP_DEVICE_HASH") != "off"


def warms_new_packs() -> bool:
    """Whether new packs are read into the page cache: ``CASNAP_WARM`` is not "off"."""
    return os.environ.get("CASNAP_WARM") != "off"


def numeric_variables() -> dict[str, str]:
    """Return the environment variables that are set and change which bits a training computes.

    The list of these variables is fixed. Only the first 100 characters of a value are kept, without
    unprintable ones.
    """
    variables = os.environ
    found = {name: variables[name] for name in _NUMERIC if name in variables}
    return {name: _printable(text[:_MOST_LETTERS]) for name, text in found.items()}


def _printable(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable())


def _number_asked(variable: str, kind: str) -> int | None:
    """Return the number that an environment variable has as its value; None if it is not set.

    Args:
        variable: The name of the variable.
        kind: A description of a right value, for the error message.

    Raises:
        StoreError: The value is not a whole number.
    """
    text = os.environ.get(variable, "").strip()
    if text and not re.fullmatch("[0-9]{1,18}", text):
        raise StoreError(f"{variable} is {text!r}; set it to {kind}")
    return int(text) if text else None


def why_refused(folder: Path) -> str | None:
    """Return the reason why a folder must not hold a cache; None if the folder may.

    The reason is the end of a sentence that begins with "it", such as "is a link of another user".
    """
    owner, linked_by = folder.stat().st_uid, folder.lstat().st_uid
    if owner != os.geteuid():
        return f"belongs to another user (uid {owner})"
    if linked_by not in (owner, 0):
        return f"is a link of another user (uid {linked_by})"
    kind = shared_type(folder)
    return None if kind is None else f"is on a network file system ({kind})"


def _cache_candidates() -> Iterator[Path]:
    setting = os.environ.get("CASNAP_CACHE_DIR")
    base = _user_folder("XDG_CACHE_HOME", ".cache")
    if setting:
        yield Path(local_path(setting))
    elif base is not None:
        yield base / "casnap"
    yield Path(_temp_folder(), f"casnap-{os.getuid()}")


def _temp_folder() -> str:
    import tempfile  # slower to import than all of casnap without torch

    return tempfile.gettempdir()


def _home() -> Path | None:
    try:
        home = Path.home()
    except RuntimeError:
        # No variable, and no passwd entry for this user; common in containers.
        return None
    return home if home.is_absolute() else None


def _user_folder(variable: str, below_home: str) -> Path | None:
    setting, home = os.environ.get(variable), _home()
    if setting:
        return Path(setting)
    return None if home is None else home / below_home


def google_metadata_server() -> tuple[str, int] | None:
    """Return host and port of the server that gives credentials to machines of Google's cloud.

    Returns:
        Host and port; None if the environment names credentials or another metadata server, or
        forbids asking this one.
    """
    variables = ("GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST", "GCE_METADATA_ROOT")
    if any(map(os.environ.get, variables)) or os.environ.get("NO_GCE_CHECK") == "true":
        return None
    host, _, port = os.environ.get("GCE_METADATA_IP", "169.254.169.254").partition(":")
    return host, int(port) if port.isdigit() else 80


def team_ranks() -> int:
    """Return how many ranks make one team, as ``CASNAP_TEAM_RANKS`` says; 8 by default.

    If there are more ranks than that, one rank of each team speaks for it (``ranks/topology.py``).

    Raises:
        StoreError: The variable is not a number.
    """
    return _number_asked("CASNAP_TEAM_RANKS", "how many ranks make one team, such as 8") or 8


def gloo_interfaces() -> list[str]:
    """Return the network interfaces that gloo must use; empty if gloo may choose."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def boot_id() -> str:
    """Return the id of this boot of the machine; "" if it is unknown.

    Caches are not synced to disk. So a cache that an earlier boot wrote may be damaged.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Whether a process with this pid runs on this host; True if the system cannot tell."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def is_other_rank() -> bool:
    """Whether this process is a rank other than 0 of ``torch.distributed``."""
    distributed: Any = sys.modules.get("torch.distributed")
    has_ranks = distributed is not None and distributed.is_available()
    return has_ranks and distributed.is_initialized() and distributed.get_rank() != 0


def crowded_folders() -> set[Path]:
    """Return the folders where casnap makes no store unless asked: ``/``, HOME and temp folders."""
    folders = {Path(p) for p in ("/", _temp_folder(), "/tmp", "/var/tmp", "/dev/shm")}
    home = _home()
    return {p.resolve() for p in (folders if home is None else folders | {home})}
