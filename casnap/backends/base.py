"""The interface of a backend: a place where objects live."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from casnap.errors import BackendError, CasnapError, ExhaustedError, StorageFullError

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""Errors that say that this host has run out of something, and nothing about the object."""


class Backend(ABC):
    """Objects by key, in folders, one level of names listed at a time.

    - Keys are relative, ``/``-separated, and never climb out.
    - An object is whole or absent: a reader never sees part of one that is being written.
    - ``write`` and ``put_if_absent`` are durable once :meth:`sync` has returned.
    - A backend retries nothing. It raises transient failures like all others.
    - A missing object raises ``FileNotFoundError``. Running out of file descriptors or memory on
      this host raises an :class:`ExhaustedError`; all else raises a :class:`BackendError`.

    Attributes:
        uri: Where this is, as the user would write it.
    """

    uri: str

    def make(self) -> None:  # noqa: B027 - nothing by default
        """Make the place itself before a store is made in it, where it does not exist yet."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A string that tells this place from every other, and from what was at this URI before.

        Each place has a cache of its own, since a copy of a store claims to be that store. A local
        place is known by its folder and its record as the file system knows them, a remote one by
        URI and endpoint. If one place has several identities, that costs only time.
        """

    @abstractmethod
    def write(self, key: str, content: memoryview | bytes) -> None:
        """Create an object under a key that no other process writes."""

    @abstractmethod
    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Create an object unless the key is taken; return whether it was created."""

    @abstractmethod
    def sync(self, *keys: str) -> None:
        """Make durable all that was written here, and some objects of other writers.

        After a failed sync, the next one assumes that nothing was made durable.

        Args:
            keys: The objects of other writers.
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
            target: The buffer. To read around the page cache, it must begin on a page.
            bulk: Whether this is part of a large transfer, which should not fill the operating
                system's cache.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Return an object's length in bytes."""

    def size_if_there(self, key: str) -> int | None:
        """Return an object's length in bytes; None if it does not exist."""
        try:
            return self.size(key)
        except FileNotFoundError:
            return None

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names right below a folder, unsorted; none if it does not exist."""

    @abstractmethod
    def copy(self, key: str, to: str) -> None:
        """Give an object a second name, which no other process writes; as durable as a write.

        Raises:
            FileNotFoundError: The object is not there.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""

    def tidy(self, min_age: float) -> int:
        """Delete what dead writers have left half-written; return how many bytes that freed.

        Args:
            min_age: Files that changed within so many seconds stay.
        """
        return 0

    def mark(self, key: str, content: bytes | None) -> None:  # noqa: B027 - nothing by default
        """Put, or with None remove, a file that is meant for people; casnap never relies on it."""


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn the operating system's errors into casnap's, except ``FileNotFoundError``."""
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
