"""The seam below a remote backend: single requests, each tried once."""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from casnap.backends.uris import without_secrets
from casnap.errors import PlaceError, StoreError


class TransientError(Exception):
    """A request failed in a way that may pass: it can be tried again.

    Attributes:
        reached: Whether the server was reached at all.
        busy: Whether the server asks for fewer requests.
        hopeless: Whether the failure is lasting if the server has never answered.
    """

    def __init__(
        self, message: str, *, reached: bool = True, busy: bool = False, hopeless: bool = False
    ) -> None:
        super().__init__(message)
        self.reached = reached
        self.busy = busy
        self.hopeless = hopeless


class TakenError(Exception):
    """The server says that an object is there already."""


class BehindItsEndError(Exception):
    """A run begins behind the end of its object."""


class Transfer:
    """A body on its way.

    Attributes:
        nbytes: How many bytes have moved so far.
    """

    nbytes: int = 0

    def restart(self) -> None:
        """Begin again, for another attempt."""
        self.nbytes = 0


class Source(Transfer):
    """The body of a request.

    Args:
        content: Its bytes.
    """

    def __init__(self, content: memoryview) -> None:
        self.content = content


class Sink(Transfer):
    """Takes the body of an answer, piece by piece, in order."""

    def expect(self, nbytes: int) -> None:
        """Note how long the whole object is, before its body comes.

        Raises:
            DamagedError: The object is longer than the sink takes.
        """

    def take(self, data: bytes | memoryview) -> None:
        """Take the next piece. By default it is dropped."""
        self.nbytes += len(data)

    def room(self) -> memoryview | None:
        """Return the memory to receive the next bytes in; None to get them by :meth:`take`."""
        return None

    def received(self, nbytes: int) -> None:
        """Note how many bytes were received in the memory that :meth:`room` returned."""
        self.nbytes += nbytes


@dataclass(frozen=True)
class Page:
    """A part of a listing.

    Attributes:
        sizes: The length in bytes of each object, by its key.
        folders: The folders, without a slash at the end.
        after: The token that continues the listing; None at its end.
        times: When each object was put, in seconds since the epoch, as far as the server tells.
    """

    sizes: Mapping[str, int]
    folders: Sequence[str]
    after: str | None
    times: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        objects: Iterable[tuple[str, int, datetime | None]],
        folders: Iterable[str],
        after: str | None,
        prefix: str,
    ) -> Page:
        """Return the page of a server's answer.

        Args:
            objects: Names with their prefix, lengths, and times as far as the server tells.
            folders: Folders with their prefix, and a slash at the end.
            after: The token that continues the listing.
            prefix: The text that all names begin with.
        """
        skip = len(prefix)
        # Consoles make empty objects for folders, which end with a slash.
        rows = [(name[skip:], size, at) for name, size, at in objects if not name.endswith("/")]
        sizes = {key: size for key, size, _ in rows}
        times = {key: at.timestamp() for key, _, at in rows if at is not None}
        return cls(sizes, [folder[skip:-1] for folder in folders], after, times)


@dataclass(frozen=True)
class ObjectFacts:
    """The facts that a server tells about an object, besides its bytes.

    Attributes:
        put_at: When the object was put, by the server's clock, in seconds since the epoch; None if
            the server does not tell.
        encryption: How the server encrypts the object, in words; empty if it does not; None if the
            server does not tell.
    """

    put_at: float | None = None
    encryption: str | None = None


class Client(ABC):
    """Makes single requests for objects below one URI. Each call runs on the event loop.

    A missing object raises a ``FileNotFoundError``, and a failure that may pass raises a
    :class:`TransientError`. Any other failure raises an ``UnavailableError`` or a ``BackendError``.
    No error holds credentials.

    Attributes:
        puts_if_absent: Whether the server can be asked to create an object only if it is absent.
    """

    puts_if_absent: bool = True

    async def connect(self) -> None:  # noqa: B027 - nothing by default
        """Do the slow work before the first request."""

    @abstractmethod
    async def endpoint(self) -> str:
        """Return a text, such as the address, that tells this server from others."""

    @abstractmethod
    async def put(self, key: str, source: Source, *, if_absent: bool = False) -> str:
        """Put an object, with a checksum that the server verifies.

        Returns:
            The word that :meth:`versioning` returns, as the answer tells it.

        Raises:
            TakenError: The object is there, and ``if_absent`` was asked for.
        """

    @abstractmethod
    async def get(self, key: str, run: tuple[int, int] | None, sink: Sink) -> int | None:
        """Get an object, or a run of it, which is given by its begin and its end.

        A run may end, or even begin, behind the end of the object. If it begins there, ``sink``
        gets nothing.

        Returns:
            The length of the whole object in bytes; if the run begins behind its end, the begin of
            the run; None if the answer does not tell.
        """

    @abstractmethod
    async def size(self, key: str) -> int:
        """Return the length of an object in bytes."""

    async def facts_of(self, key: str) -> ObjectFacts:
        """Return the facts that the server tells about an object, besides its bytes."""
        return ObjectFacts()

    @abstractmethod
    async def list(self, prefix: str, *, deep: bool, after: str | None) -> Page:
        """Return a page of the objects whose keys have a prefix; one level of them unless deep."""

    @abstractmethod
    async def copy(self, key: str, to: str) -> None:
        """Copy an object on the server."""

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> Mapping[str, TransientError | PlaceError]:
        """Delete up to :attr:`deletes` objects; return the error of each that is still there."""

    deletes: int = 1000
    """How many objects one request can delete."""

    is_bucket: bool = False
    """Whether the URI is a whole bucket, and so no object."""

    @abstractmethod
    async def is_object(self) -> bool:
        """Whether the URI is itself an object. It is not asked of a bucket."""

    rule_kinds: Sequence[str] = ()
    """The rules of the bucket that can be looked at, one request each."""

    async def rules(self, kind: str) -> Mapping[str, Any]:
        """Return the rules of one kind; nothing if the bucket has none, or cannot have any."""
        return {}

    def warnings(self, rules: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        """Return how the rules of all kinds can hurt a store here, in words."""
        return []

    keeps_versions: bool = False
    """Whether old versions of objects can be kept here, and :meth:`versioning` is a request."""

    async def versioning(self) -> str:
        """Return a word if the bucket keeps old versions, or did; empty if it never has."""
        return ""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""


def tls_problem(errors: Iterable[BaseException | None]) -> TransientError | None:
    """Return the error for a failed TLS handshake; None if none failed, or the line just broke."""
    for error in errors:
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            return TransientError(
                f"the TLS handshake failed ({without_secrets(str(error))}); if the server does not "
                "speak TLS on this port, name it with http://",
                reached=False,
                hopeless=True,
            )
    return None


@contextmanager
def valid_options(uri: str) -> Iterator[None]:
    """Raise a StoreError, within a ``with`` block, for arguments that a library does not take."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as e:
        detail = without_secrets(str(e))
        # A traceback would show the message of the cause, with the secrets in it.
        cause = e if detail == str(e) else None
        raise StoreError(f"{uri}: wrong storage_options: {detail}") from cause
