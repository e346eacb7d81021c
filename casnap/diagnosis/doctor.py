"""Try a place: run all probes, work with a process of another host, and tidy up."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from casnap.backends import LocalBackend, backend_at
from casnap.backends.late_names import is_left_open
from casnap.backends.local_files import is_folder, translated
from casnap.backends.uris import joined, store_uri
from casnap.diagnosis import bucket_probes, folder_probes
from casnap.diagnosis.other_half import HALF, Meeting
from casnap.diagnosis.report import DoctorReport, DoctorRow
from casnap.diagnosis.site import Site
from casnap.diagnosis.speed_probes import speed_rows
from casnap.errors import PLACE_ERRORS, BackendError
from casnap.runtime.environment import local_path
from casnap.runtime.file_systems import is_on_shared
from casnap.runtime.units import Duration, seconds_of

WORK_FOLDER = ".casnap-doctor"
"""The folder, at the place that is tried, into which the doctor writes."""
WAIT = 20.0
"""How many seconds to look for a process of another host, at a place that other hosts can reach."""
# How many seconds all probes may take together, if the wait is no longer than WAIT.
_ALL = 55.0
# How many seconds to try to delete the files of the probes. A client of FUSE or NFS renames a
# deleted file that was just in use. Some clients delete it a little later, some never.
_TIDYING = 3.0
# Files that did not change for this many seconds are left over from a process that was killed.
_LEFT = 3600.0


def doctor(
    place: str | os.PathLike[str],
    *,
    wait: Duration | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> DoctorReport:
    """Find out whether a folder or a bucket can hold a store, and how fast it is.

    If you call it on two hosts at once, it also finds out whether put-if-absent holds between
    hosts, and how late one host sees the changes of the other. It takes a minute at most; a
    ``wait`` of more than 20 seconds adds to that. If a slow place leaves no time for some probes,
    they are skipped.

    The doctor writes into the folder ``.casnap-doctor`` of the place, and deletes it at the end. A
    process that is killed leaves that folder, which you can delete.

    Args:
        place: A folder that exists, or a URI as for :class:`casnap.Store`.
        wait: How long to look for another host that does the same; by default 20 seconds at a place
            that other hosts can reach, and 0 on a disk of this host.
        storage_options: For a remote place, as for :class:`casnap.Store`.
        progress: Called before each probe with its name, in words.

    Raises:
        StoreError: The place does not exist, or nothing can be written there.
    """
    started = time.monotonic()
    uri = os.fspath(place)
    folder = None if store_uri(uri) is not None else _folder(uri)
    is_shared = folder is None or is_on_shared(str(folder))
    patience = seconds_of("wait", wait) if wait is not None else WAIT * is_shared
    probes = bucket_probes.PROBES if folder is None else folder_probes.PROBES
    rows: list[DoctorRow] = []
    seconds = _ALL + max(0.0, patience - WAIT)
    with _site_at(uri, folder, storage_options, seconds) as site:
        meeting = Meeting(site)
        if patience:
            meeting.announce(patience)
        for name, probe in probes:
            _tell(progress, name)
            rows += _tried(site, name, partial(_one, probe, site))
        if patience:
            _tell(progress, "the other half, on another host")
            rows += _tried(site, "other half", meeting.rows)
        if all(row.verdict != "bad" for row in rows):
            _tell(progress, "speed")
            rows += _tried(site, "speed", lambda: speed_rows(site))
    taken = time.monotonic() - started
    return DoctorReport(str(folder or uri), tuple(rows), meeting.other_host, taken)


def _one(probe: Callable[[Site], DoctorRow | None], site: Site) -> list[DoctorRow]:
    row = probe(site)
    return [] if row is None else [row]


def _tell(progress: Callable[[str], None] | None, name: str) -> None:
    if progress is not None:
        progress(name)


def _tried(site: Site, name: str, probe: Callable[[], Iterable[DoctorRow]]) -> list[DoctorRow]:
    """Run a probe if time is left; return its rows. If it fails, the last row has the error.

    Args:
        site: The site, which knows how much time is left.
        name: The name of the probe.
        probe: Yields the rows.
    """
    rows: list[DoctorRow] = []
    if not site.left:
        advice = "this place is slow: try it while others do not use it, or with --wait 0"
        return [DoctorRow(name, "no time was left for it", "unknown", advice)]
    try:
        with translated(name):
            rows.extend(probe())
    except (FileNotFoundError, *PLACE_ERRORS) as e:
        rows.append(DoctorRow(name, f"failed: {e}", "bad", "casnap would meet this error, too"))
    return rows


def _folder(path: str) -> Path:
    folder = Path(os.path.realpath(local_path(path)))
    if not is_folder(folder):
        raise BackendError(f"{folder} is no folder; name one that is there, to be tried")
    return folder


@contextmanager
def _site_at(
    uri: str, folder: Path | None, storage_options: Mapping[str, Any] | None, seconds: float
) -> Iterator[Site]:
    """Yield a site at a place; delete its files at the end of the ``with`` block.

    Args:
        uri: The place.
        folder: The place as a folder; None if it is remote.
        storage_options: How to reach a remote place.
        seconds: How many seconds all probes together may take.
    """
    if folder is None:
        backend = backend_at(joined(uri.rstrip("/"), WORK_FOLDER), storage_options)
    else:
        backend = LocalBackend(folder / WORK_FOLDER)
        backend.make()
    site = Site(backend, seconds)
    try:
        if folder is not None:
            with translated(str(folder)):
                site.folder.mkdir(parents=True)
                _clear(site)
        yield site
    finally:
        _tidy(site, None if folder is None else folder / WORK_FOLDER)


def _tidy(site: Site, folder: Path | None) -> None:
    """Delete what this process has put at the place.

    In a folder of this host, also delete the work folder, unless another process works there. Some
    file systems delete files late, so this is tried again for up to 3 seconds.

    Args:
        site: The site.
        folder: The work folder; None at a remote place.
    """
    own = [site.key, f"{HALF}{site.me}"]
    backend = site.backend
    if folder is None:
        backend.delete_all([key for name in own for key in backend.sizes(name)])
        return
    objects = Path(backend.where(""))
    end = time.monotonic() + _TIDYING
    while True:
        for name in own:
            shutil.rmtree(objects / name, ignore_errors=True)
        for name in _names_in(objects / "tmp"):
            if is_left_open(name):
                with suppress(OSError):
                    (objects / "tmp" / name).unlink()
        for path in (objects / "tmp", objects, folder):
            with suppress(OSError):
                path.rmdir()
        # Each other process that works there has a folder there.
        others = set(_names_in(objects)) - {"tmp", *own}
        is_gone = folder.name not in _names_in(folder.parent)
        if others or is_gone or time.monotonic() > end:
            return
        time.sleep(_TIDYING / 30)


def _names_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def _clear(site: Site) -> None:
    """Delete what killed processes have left: all that is an hour old by the folder's clock."""
    now = site.folder.stat().st_mtime
    for path in site.folder.parent.iterdir():
        with suppress(OSError):
            if path.name != "tmp" and now - path.stat().st_mtime > _LEFT:
                shutil.rmtree(path)
    site.backend.tidy(_LEFT)
