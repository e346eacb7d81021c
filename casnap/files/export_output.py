"""The output of an export: a file or folder that appears whole under its name, or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from casnap.backends.local_files import is_folder, is_taken
from casnap.backends.uris import without_secrets
from casnap.errors import FileFormatError
from casnap.format.names import STORE_FOLDER
from casnap.runtime.descriptors import opened

# A Path has one slash where a URI has two.
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class ExportOutput:
    """A file or folder that is written under a temporary name beside its final name, then renamed.

    Args:
        out: Its final path.
        is_folder: Whether it is a folder.
        nbytes: About how many bytes it will have.
        mode: The mode of its files; the umask takes rights away.

    Raises:
        FileFormatError: Something lies at ``out``.
        OSError: The folder of ``out`` does not exist, or has not enough space.

    Attributes:
        sizes: The length of each file that was written, by its name.
    """

    def __init__(self, out: Path, *, is_folder: bool, nbytes: int, mode: int = 0o666) -> None:
        self._out = out
        self._is_folder = is_folder
        self._mode = mode
        check_absent(out)
        if shutil.disk_usage(out.parent).free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))
        # A name has at most 255 bytes, not characters.
        name = os.fsdecode(os.fsencode(out.name)[:200])
        self._partial = out.parent / f".{name}.{os.urandom(6).hex()}.partial"
        self.sizes: dict[str, int] = {}

    def __enter__(self) -> ExportOutput:
        if self._is_folder:
            self._partial.mkdir(self._mode | 0o111)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            with suppress(OSError):
                if self._is_folder:
                    shutil.rmtree(self._partial)
                else:
                    self._partial.unlink()

    @contextmanager
    def file(self, name: str, nbytes: int = 0) -> Iterator[int]:
        """Create a file, yield its descriptor, and sync the file at the end of the ``with`` block.

        Args:
            name: Its name in the folder; if the output is a single file, that file's name.
            nbytes: A length that the file will reach: its space is reserved before any write.
        """
        path = self._partial / name if self._is_folder else self._partial
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        with opened(path, flags, self._mode) as fd:
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
            yield fd
            os.fsync(fd)
            self.sizes[name] = os.fstat(fd).st_size

    def link(self, name: str, file: Path) -> None:
        """Make a hard link in the folder to ``file``, which must not change any more."""
        os.link(file, self._partial / name, follow_symlinks=False)

    def stat(self, name: str) -> os.stat_result:
        """Return the status of a file in the folder."""
        return (self._partial / name).stat()

    def _publish(self) -> None:
        if self._is_folder:
            _sync_folder(self._partial)
            try:
                self._partial.rename(self._out)
            except OSError as e:
                check_absent(self._out, e)
                raise
        else:
            try:
                os.link(self._partial, self._out)
            except FileExistsError as e:
                check_absent(self._out, e)
            except OSError as e:  # a file system without links
                check_absent(self._out, e)
                self._partial.rename(self._out)
        try:
            _sync_folder(self._out.parent)
        except OSError:
            # The rename may not be durable, so undo it: the output is there whole, or not at all.
            if self._is_folder:
                self._out.rename(self._partial)
            else:
                self._out.unlink()
            raise


def check_place(out: Path) -> None:
    """Check that an export can write to a path.

    Raises:
        FileFormatError: ``out`` is a URI, lies inside of a store, or exists.
        FileNotFoundError: The folder of ``out`` does not exist.
    """
    check_local(
        out,
        "and an export goes to a disk: export to a local path, then upload that; `casnap cp` "
        "copies snapshots to another store",
    )
    check_absent(out)
    if not is_folder(out.parent):
        raise FileNotFoundError(2, "No such folder", str(out.parent))
    check_outside(out.resolve())


def check_outside(real: Path) -> None:
    """Check that a path is outside of any store.

    Args:
        real: The path, without links.

    Raises:
        FileFormatError: The path lies inside of a store.
    """
    if STORE_FOLDER in real.parts:
        raise FileFormatError(
            f"{real} is inside of a store, where only casnap writes; name a folder beside "
            f"{STORE_FOLDER}"
        )


def check_local(path: Path, advice: str) -> None:
    """Check that a path is not a URI.

    Args:
        path: The path.
        advice: The end of the message.

    Raises:
        FileFormatError: It is a URI.
    """
    if _URI.match(str(path)):
        raise FileFormatError(f"{without_secrets(str(path))} is a URI, {advice}")


def check_absent(out: Path, cause: OSError | None = None) -> None:
    """Check that the output of an export does not exist.

    Args:
        out: The path of the output.
        cause: The error of the system, if one was met.

    Raises:
        FileFormatError: Something lies at ``out``.
    """
    if is_taken(out):
        raise FileFormatError(
            f"{out} exists already; choose another name, or move it away first"
        ) from cause


def _sync_folder(folder: Path) -> None:
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)
