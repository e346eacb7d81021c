"""The interface by which a remote backend makes single requests. A client tries each only once."""

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
    """A request failed, but another attempt may succeed.

    Attributes:
        reached: Whether the server was reached at all.
        busy: Whether the server asks for fewer requests.
        hopeless: Whether to make no further attempt, unless this server has answered before.
    """

    def __init__(
        self, message: str, *, reached: bool = True, busy: bool = False, hopeless: bool = False
    ) -> None:
        super().__init__(message)
        self.reached = reached
        self.busy = busy
        self.hopeless = hopeless


class TakenError(Exception):
    """The server refused a put with a condition, since the object exists already."""


class BehindItsEndError(Exception):
    """The run that a request asked for begins behind the end of the object."""


class Transfer:
    """The body of a request or an answer while it is sent or received.

    Attributes:
        nbytes: How many of its bytes were sent or received so far.
    """

    nbytes: int = 0

    def restart(self) -> None:
        """Begin the body again, for another attempt."""
        self.nbytes = 0


class Source(Transfer):
    """The body of a request.

    Args:
        content: The bytes of the body.
    """

    def __init__(self, content: memoryview) -> None:
        self.content = content


class Sink(Transfer):
    """Takes the body of an answer, piece by piece, in order. This base class drops the bytes."""

    def expect(self, nbytes: int) -> None:
        """Learn how long the whole object is, before the body comes.

        Raises:
            DamagedError: The object is longer than the sink allows.
        """

    def take(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the body. By default they are dropped."""
        self.nbytes += len(data)

    def room(self) -> memoryview | None:
        """Return memory to receive the next bytes into; None if :meth:`take` is to get them."""
        return None

    def received(self, nbytes: int) -> None:
        """Learn how many bytes were received into the memory that :meth:`room` has returned."""
        self.nbytes += nbytes


@dataclass(frozen=True)
class Page:
    """A page of a listing.

    Attributes:
        sizes: The length in bytes of each object, keyed by object.
        folders: The folders, without a slash at the end.
        after: The token by which to ask for the next page; None on the last page.
        times: When each object was put, in seconds since the epoch, keyed by object. Objects whose
            time the server does not report are missing.
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
        """Return the page that a server's answer describes.

        Args:
            objects: For each object, its name with the prefix, its length, and the time of its put,
                or None.
            folders: The folders, with the prefix, and with a slash at the end.
            after: The token by which to ask for the next page; None on the last page.
            prefix: The text that all names and folders begin with, and that is cut off.
        """
        skip = len(prefix)
        # Consoles make empty objects for folders, which end with a slash.
        rows = [(name[skip:], size, at) for name, size, at in objects if not name.endswith("/")]
        sizes = {key: size for key, size, _ in rows}
        times = {key: at.timestamp() for key, _, at in rows if at is not None}
        return cls(sizes, [folder[skip:-1] for folder in folders], after, times)


@dataclass(frozen=True)
class ObjectFacts:
    """Facts about an object that a server reports, besides its bytes and length.

    Attributes:
        put_at: When the object was put, by the server's clock, in seconds since the epoch; None if
            the server does not report it.
        encryption: How the server encrypts the object, in words; "" if it does not; None if the
            server does not report it.
    """

    put_at: float | None = None
    encryption: str | None = None


class Client(ABC):
    """Makes single requests for objects below one URI. All calls run on the event loop.

    A missing object raises a ``FileNotFoundError``. A failure that may pass raises a
    :class:`TransientError`. Any other failure raises an ``UnavailableError`` or a ``BackendError``.
    No error message contains credentials.

    Attributes:
        puts_if_absent: Whether the server offers a put with the condition that the object is
            absent.
    """

    puts_if_absent: bool = True

    async def connect(self) -> None:  # noqa: B027 - nothing by default
        """Prepare for requests, if that takes time. It is called before the first request."""

    @abstractmethod
    async def endpoint(self) -> str:
        """Return a text that no other server has, such as the address."""

    @abstractmethod
    async def put(self, key: str, source: Source, *, if_absent: bool = False) -> str:
        """Put an object, with a checksum that the server verifies.

        Args:
            key: The key of the object.
            source: The content.
            if_absent: Whether to put it only if no object has this key.

        Returns:
            The same word as :meth:`versioning`, taken from the server's answer.

        Raises:
            TakenError: ``if_absent`` is set, and an object has this key.
        """

    @abstractmethod
    async def get(self, key: str, run: tuple[int, int] | None, sink: Sink) -> int | None:
        """Get an object, or a run of its bytes.

        Args:
            key: The key of the object.
            run: The offset of the run's first byte, and one past its last. Both may lie behind the
                end of the object. None for the whole object.
            sink: Takes the bytes. It gets none if the run begins behind the end of the object.

        Returns:
            The length of the whole object in bytes; None if the answer does not say it. If the run
            begins behind the end of the object: the first element of ``run``.
        """

    @abstractmethod
    async def size(self, key: str) -> int:
        """Return the length of an object in bytes."""

    async def facts_of(self, key: str) -> ObjectFacts:
        """Return what the server reports about an object besides its bytes and length."""
        return ObjectFacts()

    @abstractmethod
    async def list(self, prefix: str, *, deep: bool, after: str | None) -> Page:
        """Return a page of the objects whose keys begin with a prefix.

        Args:
            prefix: The prefix.
            deep: Whether to list objects at any depth. Otherwise the page has the objects and
                folders of one level.
            after: The token of the page before; None for the first page.
        """

    @abstractmethod
    async def copy(self, key: str, to: str) -> None:
        """Have the server copy an object."""

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> Mapping[str, TransientError | PlaceError]:
        """Delete up to :attr:`deletes` objects.

        Returns:
            An error for each object that still exists, keyed by object.
        """

    deletes: int = 1000
    """How many objects one request can delete."""

    is_bucket: bool = False
    """Whether the URI is a whole bucket, and so no object."""

    @abstractmethod
    async def is_object(self) -> bool:
        """Whether an object has the client's own URI. It is not called if the URI is a bucket."""

    rule_kinds: Sequence[str] = ()
    """The kinds of bucket rules that :meth:`rules` can read, by one request each."""

    async def rules(self, kind: str) -> Mapping[str, Any]:
        """Return the bucket's rules of one kind; empty if it has none, or the server knows none.

        Args:
            kind: One of :attr:`rule_kinds`.
        """
        return {}

    def warnings(self, rules: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        """Return warnings, in words, about rules that can hurt a store at this URI.

        Args:
            rules: The rules of each kind, in the order of :attr:`rule_kinds`.
        """
        return []

    keeps_versions: bool = False
    """Whether the server can keep old versions of objects. If so, ask :meth:`versioning`."""

    async def versioning(self) -> str:
        """Return a word if the bucket keeps, or once kept, old versions of objects; else ""."""
        return ""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""


def tls_problem(errors: Iterable[BaseException | None]) -> TransientError | None:
    """Return an error that explains a failed TLS handshake.

    Args:
        errors: The error of a request, and the errors that caused it.

    Returns:
        The error; None if no handshake failed, or if one failed only because the connection broke.
    """
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
    """Turn errors in a ``with`` block about wrong arguments of a library into a StoreError.

    Args:
        uri: The URI of the place, for the message.

    Raises:
        StoreError: The block raised a TypeError, ValueError or KeyError.
    """
    try:
        yield
    except (TypeError, ValueError, KeyError) as e:
        detail = without_secrets(str(e))
        # A traceback would show the message of the cause, with the secrets in it.
        cause = e if detail == str(e) else None
        raise StoreError(f"{uri}: wrong storage_options: {detail}") from cause
