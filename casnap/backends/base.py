"""What casnap asks of the place where objects live."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from casnap.errors import BackendError, CasnapError, ExhaustedError, StorageFullError

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""What the operating system says where it has no more to give: nothing about what was asked for."""


class Backend(ABC):
    """Objects by key, in folders, one level of names listed at a time.

    - Keys are relative, ``/``-separated, and never climb out.
    - An object is whole or absent: a reader never sees part of one that is being written.
    - ``write`` and ``put_if_absent`` are durable once :meth:`sync` has returned.
    - Nothing is retried here; what the backend calls transient is raised as any failure.
    - A missing object raises ``FileNotFoundError``; all else a :class:`BackendError`, and where
      that says nothing about the object, but that this host has no more to give, an
      :class:`ExhaustedError`.

    Attributes:
        uri: Where this is, as the user would write it.
    """

    uri: str

    def make(self) -> None:  # noqa: B027 - nothing by default
        """Make the place itself before a store is made in it, where it does not exist yet."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """What tells this place from every other, and from what was at this URI before.

        What is remembered of a store counts only where it was learned: others may say that they
        are that store. For a local store this is its folder and its record as the file system
        knows them, for a remote one its URI and endpoint. Where one place has several, only time
        is lost.
        """

    @abstractmethod
    def write(self, key: str, content: memoryview | bytes) -> None:
        """Create an object under a key that nobody else writes."""

    @abstractmethod
    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Create an object unless the key is taken; return whether it was created."""

    @abstractmethod
    def sync(self, *keys: str) -> None:
        """Make everything that was written durable, and objects that somebody else has put.

        If it fails, the next one does not believe that anything was made durable by then.

        Args:
            keys: Those objects.
        """

    @abstractmethod
    def read(self, key: str) -> bytes:
        """Return a whole object."""

    @abstractmethod
    def read_into(self, key: str, offset: int, target: memoryview, *, bulk: bool = False) -> int:
        """Fill ``target`` from a run of an object; return how many bytes there were.

        Args:
            key: The object.
            offset: Where the run begins.
            target: Where to; begins on a page if the read is to go around the page cache.
            bulk: Whether this is part of a large transfer, which should leave the operating
                system's cache to others.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Return an object's length in bytes."""

    def size_if_there(self, key: str) -> int | None:
        """Return an object's length in bytes, or None where there is none."""
        try:
            return self.size(key)
        except FileNotFoundError:
            return None

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names right below a folder, unsorted; empty where there is none."""

    @abstractmethod
    def copy(self, key: str, to: str) -> None:
        """Give an object's bytes another name too, that nobody else writes; as durable as a write.

        Raises:
            FileNotFoundError: The object is not there.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

    def tidy(self, min_age: float) -> int:
        """Remove what writers that died have left half-written; return how many bytes that freed.

        Args:
            min_age: What changed within so many seconds is left alone.
        """
        return 0

    def mark(self, key: str, content: bytes | None) -> None:  # noqa: B027 - nothing by default
        """Put, or with None remove, a file that tells people what is here; never read as truth."""


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn the operating system's errors into casnap's, but for a missing object."""
    try:
        yield
    except (FileNotFoundError, CasnapError):
        raise
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageFullError(
                f"no space left to write {what}; earlier snapshots are whole. "
                "Free some space, then try again"
            ) from e
        if e.errno in EXHAUSTED:
            raise ExhaustedError(
                f"{what}: {e.strerror}; nothing is known to be wrong with it. This process or host "
                "has too many files open (`ulimit -n`), or no memory left; then try again"
            ) from e
        if e.errno == errno.EISDIR:
            raise BackendError(f"{what} is a folder, not a file") from e
        if e.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise BackendError(f"{what}: {e.strerror}; is the store writable for this user?") from e
        raise BackendError(f"{what}: {e.strerror or e}") from e
