"""The backend that keeps objects on a server. It counts and retries requests."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from casnap.backends.announcement import NOTE, NOTE_LASTS
from casnap.backends.base import (
    MAX_MARKER_BYTES,
    MAX_WHOLE_BYTES,
    TEMPORARY,
    Backend,
    Target,
)
from casnap.backends.remote.client import (
    Client,
    ObjectFacts,
    Page,
    Sink,
    Source,
    TakenError,
    Transfer,
    TransientError,
)
from casnap.backends.remote.event_loop import event_loop
from casnap.backends.remote.retries import Operation, Retries, cancel_and_wait
from casnap.backends.remote.scatter import Scatter, Whole, runs
from casnap.errors import (
    PLACE_ERRORS,
    BackendError,
    CasnapError,
    DamagedError,
    PlaceError,
    UnavailableError,
)
from casnap.format.names import STORE_FOLDER
from casnap.runtime.fork import PerProcess, in_child, new_lock
from casnap.runtime.sizes import size as in_words
from casnap.runtime.typing import override

T = TypeVar("T")
# The most requests of one backend at a time. They keep server and line busy, and bound the memory.
_REQUESTS = 24
_LARGEST = 48 << 20
# How long a probe of put-if-absent may take at most, in seconds, and how wrong a clock may be.
_IN_USE = 3600.0
# A page of a listing that shows fewer folders than this is full of their objects. Then listing the
# other folders side by side is faster, and costs few requests more.
_FEW_FOLDERS = 4
# Held while a client is made.
_connecting = new_lock()
# By URI: held while casnap itself looks whether an object is absent, and then puts it.
_only_writer = defaultdict[str, threading.Lock](new_lock)
# The servers that have ever answered this process, so their addresses are not mistyped.
_answered: PerProcess[set[str]] = PerProcess(set)


class RemoteBackend(Backend):
    """Objects below a URI, reached by a :class:`Client`.

    Many threads can use it at once, and so can forked children, which make connections of their
    own.

    Args:
        uri: The URI of the place, without a slash at the end.
        connect: Makes a client.
        retries: How often and how long requests are tried.
    """

    costly_requests = True
    in_flight = 16
    has_page_cache = False
    needs_probe = True
    max_chunk_bytes = 32 << 20

    def __init__(
        self, uri: str, connect: Callable[[], Client], retries: Retries | None = None
    ) -> None:
        self.uri = uri
        self._connect = connect
        self._retries = retries or Retries()
        self._counts: Counter[str] = Counter()
        self._received = 0
        self._disconnect()
        in_child(self._disconnect)
        # Whether the last operation was given up, and the server has not answered since.
        self._failing = False
        # The answer of the last put, or of the last look; None before the first.
        self._versioning: str | None = None

    def _disconnect(self) -> None:
        self._connected: _Connected | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what is needed to connect: another process makes a connection of its own."""
        made_of = (self.uri, self._connect, self._retries)
        return type(self), made_of, {"exclusive": self.exclusive}

    @property
    @override
    def requests(self) -> Mapping[str, int]:
        """How many attempts were made, keyed by kind: get, put, list, copy, delete."""
        return dict(self._counts)

    @property
    @override
    def received_bytes(self) -> int:
        """How many bytes of objects the server has sent, those of failed attempts included."""
        return self._received

    @property
    @override
    def identity(self) -> str:
        """The URI of the place, and the server's address."""
        return f"{self.uri} {self._reach().server}"

    @property
    @override
    def endpoint(self) -> str:
        """The server's address, and the URI of the bucket."""
        return f"{self._reach().server} {'/'.join(self.uri.split('/')[:3])}"

    @property
    @override
    def versioning(self) -> str:
        if self._versioning is None:
            self._versioning = self._run(self._asked_versioning())
        return self._versioning

    async def _asked_versioning(self) -> str:
        if not self._reach().client.keeps_versions:
            return ""
        try:
            return await self._request(
                "get", "look at the versioning", lambda client: client.versioning()
            )
        except UnavailableError as e:
            if e.reason != "denied":
                raise
            return ""  # the answer to the first put tells it

    @property
    @override
    def can_put_if_absent(self) -> bool:
        return self._reach().client.puts_if_absent

    @override
    def is_object(self) -> bool:
        if self._reach().client.is_bucket:
            return False
        return self._run(
            self._request("get", f"look at {self.uri}", lambda client: client.is_object())
        )

    @override
    def bucket_warnings(self) -> list[str]:
        return self._run(self._warnings())

    async def _warnings(self) -> list[str]:
        client = self._reach().client

        def look(kind: str) -> Coroutine[Any, Any, Mapping[str, Any]]:
            return self._request("get", f"look at {kind}", lambda client: client.rules(kind))

        return list(client.warnings(await together([look(kind) for kind in client.rule_kinds])))

    @override
    def write(self, key: str, content: memoryview | bytes) -> None:
        self._run(self._put(_inside(key), self._checked(key, content)))

    @override
    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Put an object unless its key is taken; return whether the object is this writer's.

        If the server's answer is unclear, the backend reads the existing object. If that object has
        the very same bytes, an earlier attempt of this call must have put it. So different writers
        must put different bytes.
        """
        request = partial(self._put_if_absent, _inside(key), self._checked(key, content))
        if not self.exclusive:
            return self._run(request())
        # The server keeps no writers apart. The lock keeps writers of this process apart, such as a
        # take and the collection in the background.
        with _only_writer[self.uri]:
            return self._run(request())

    @override
    def sync(self, *keys: str) -> None:
        """Do nothing: an object is durable once the server has accepted it."""

    @override
    def read(self, key: str, most: int = MAX_WHOLE_BYTES) -> bytes:
        return self._run(self._read(_inside(key), most))

    @override
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        """Read runs of bytes: near ones by one request, long ones by several requests at once."""
        sinks = runs(targets)
        key = _inside(key)
        sizes = self._run(together([self._get(key, sink) for sink in sinks])) if sinks else []
        # The answer to a range behind the end says only that the object is no longer than that.
        size = min((size for size in sizes if size is not None), default=sys.maxsize)
        return [max(0, min(len(target), size - offset)) for offset, target in targets]

    @override
    def filled(self, key: str, targets: Sequence[Target], use: Callable[[int], None]) -> None:
        full: SimpleQueue[int | None] = SimpleQueue()
        for number, (_, target) in enumerate(targets):
            if not len(target):
                full.put(number)
        sinks = runs(targets, full.put)
        key = _inside(key)

        async def read() -> None:
            try:
                await together([self._get(key, sink) for sink in sinks])
            finally:
                full.put(None)

        def look() -> None:
            while (number := full.get()) is not None:
                use(number)

        self._run(read(), look)

    @override
    def size(self, key: str) -> int:
        key = _inside(key)
        return self._run(self._request("get", f"look at {key}", lambda client: client.size(key)))

    def facts_of(self, key: str) -> ObjectFacts:
        """Return what the server reports about an object besides its bytes and length."""
        key = _inside(key)
        return self._run(
            self._request("get", f"look at {key}", lambda client: client.facts_of(key))
        )

    @override
    def names(self, folder: str) -> list[str]:
        prefix = _inside(f"{folder}/" if folder else "")
        pages = self._run(self._pages(prefix, deep=False))
        paths = [path for page in pages for path in (*page.sizes, *page.folders)]
        return list({path[len(prefix) :] for path in paths})

    @override
    def sizes(self, folder: str) -> dict[str, int]:
        sizes = self._run(self._sizes(_inside(f"{folder}/" if folder else "")))
        return {_outside(key): nbytes for key, nbytes in sizes.items()}

    @override
    def copy(self, key: str, to: str) -> None:
        """Have the server copy an object."""
        key, to = _inside(key), _inside(to)
        self._run(self._request("copy", f"copy {key} to {to}", lambda client: client.copy(key, to)))

    @override
    def delete(self, key: str) -> None:
        for error in self._run(self._delete([_inside(key)])).values():
            raise error

    @override
    def delete_all(self, keys: Iterable[str]) -> dict[str, PlaceError]:
        inside = [*dict.fromkeys(map(_inside, keys))]
        errors: dict[str, PlaceError] = self._run(self._delete_all(inside))
        for error in errors.values():
            if not (isinstance(error, UnavailableError) and error.reason == "denied"):
                raise error
        return {_outside(key): error for key, error in errors.items()}

    @override
    def where(self, key: str) -> str:
        return f"{self.uri}/{_inside(key)}"

    @override
    def mark(self, key: str, content: bytes) -> None:
        self._run(self._put(key, self._checked(key, content)))

    @override
    def read_marker(self, key: str) -> bytes:
        return self._run(self._read(key, MAX_MARKER_BYTES))

    @override
    def unmark(
        self, keys: Iterable[str], is_stale: Callable[[str, bytes], bool]
    ) -> dict[str, CasnapError]:
        return self._run(self._unmark([*keys], is_stale))

    async def _unmark(
        self, keys: Sequence[str], is_stale: Callable[[str, bytes], bool]
    ) -> dict[str, CasnapError]:
        errors: dict[str, CasnapError] = {}

        async def look(key: str) -> bool:
            try:
                return is_stale(key, await self._read(key, MAX_MARKER_BYTES))
            except FileNotFoundError:
                return False
            except CasnapError as e:
                errors[key] = e
                return False

        stale = await together([look(key) for key in keys])
        going = [key for key, is_going in zip(keys, stale, strict=True) if is_going]
        return {**errors, **await self._delete_all(going)}

    @override
    def tidy(self, min_age: float) -> int:
        """Delete what killed processes left in ``tmp/``: notes, and the objects of probes.

        An object of a probe is deleted once it is an hour old, since the probe may still run before
        that; a note, once it is a day old. The server reports when each was put.
        """
        return self._run(self._tidy(min_age))

    async def _tidy(self, min_age: float) -> int:
        folder = _inside("tmp/")
        pages = await self._pages(folder, deep=True)
        lasts = {TEMPORARY: max(min_age, _IN_USE), NOTE: max(min_age, NOTE_LASTS)}
        now = time.time()
        old_sizes = {
            key: page.sizes[key]
            for page in pages
            for key, at in page.times.items()
            for names, seconds in lasts.items()
            if now - at >= seconds and names.fullmatch(key.removeprefix(folder))
        }
        refused = await self._delete_all(list(old_sizes))
        return sum(size for key, size in old_sizes.items() if key not in refused)

    # --- one process, one client ---

    def _run(self, work: Coroutine[Any, Any, T], meanwhile: Callable[[], None] | None = None) -> T:
        try:
            self._reach()
        except BaseException:
            work.close()
            raise
        return event_loop.run(work, meanwhile)

    def _reach(self, refused: _Connected | None = None) -> _Connected:
        """Return this process's connection.

        If there is none, connect first, which may take a while.

        Coroutines on the event loop always find a connection, since the thread that started them
        has connected.

        Args:
            refused: A connection whose credentials the server has refused. It is replaced by a new
                one.
        """
        connected = self._connected
        if connected is None or connected is refused:
            with _connecting:
                connected = self._connected
                if connected is None or connected is refused:
                    client = self._connect()
                    event_loop.run(client.connect())
                    server = event_loop.run(client.endpoint())
                    connected = _Connected(client, server, asyncio.Semaphore(_REQUESTS))
                    # The client is closed once no request uses it.
                    event_loop.close_with(connected, client.close)
                    self._connected = connected
        return connected

    def _checked(self, key: str, content: memoryview | bytes) -> memoryview:
        view = memoryview(content).cast("B")
        if len(view) > _LARGEST:
            raise BackendError(
                f"{self.uri}/{key} has {in_words(len(view))}; objects here have "
                f"{in_words(_LARGEST)} at most, so that one request puts them"
            )
        return view

    # --- requests ---

    async def _request(
        self,
        kind: str,
        action: str,
        work: Callable[[Client], Coroutine[Any, Any, T]],
        transfer: Transfer | None = None,
    ) -> T:
        """Make a request. Repeat it as long as its failures may pass, and time is left.

        Args:
            kind: The kind of request, to count it.
            action: The request in words, for messages.
            work: Makes one attempt, given the client.
            transfer: The body that the request sends or receives, if it has one.

        Raises:
            UnavailableError: No attempt has succeeded.
        """
        async with self._reach().slots:
            operation = self._operation(action)
            while True:
                try:
                    return await self._attempt(operation, kind, work, transfer)
                except TransientError as e:
                    await self._pause(operation, e)
                except TakenError as e:
                    # casnap sets no condition here, so the user's options or a faulty server did.
                    raise BackendError(f"cannot {action} at {self.uri}: {e}") from e

    def _operation(self, action: str) -> Operation:
        given_up, answered = self._failing, self._reach().server in _answered.value
        return Operation(
            f"{action} at {self.uri}", self._retries, answered=answered, failing=given_up
        )

    async def _pause(self, operation: Operation, error: TransientError) -> None:
        """Wait before the next attempt of an operation.

        Raises:
            UnavailableError: No attempt, or no time, is left. The next operations are then given
                less time.
        """
        try:
            await operation.pause(error)
        except UnavailableError:
            self._failing = True
            raise

    async def _attempt(
        self,
        operation: Operation,
        kind: str,
        work: Callable[[Client], Coroutine[Any, Any, T]],
        transfer: Transfer | None = None,
    ) -> T:
        """Make one attempt.

        If the server refuses the credentials, read them again and try once more.

        The credentials may have expired, or their file may have been replaced since it was read.

        Args:
            operation: The operation that the attempt belongs to.
            kind: The kind of request, to count it.
            work: Makes the attempt, given the client.
            transfer: The body that the request sends or receives, if it has one.
        """
        transfer = transfer or Transfer()
        connected = self._reach()
        for attempt in range(2):
            transfer.restart()
            self._counts[kind] += 1
            try:
                result = await operation.watched(work(connected.client), transfer)
            except UnavailableError as e:
                if e.reason != "credentials" or attempt:
                    raise
                connected = await asyncio.to_thread(self._reach, connected)
            else:
                _answered.value.add(connected.server)
                self._failing = False
                return result
            finally:
                self._received += transfer.nbytes if isinstance(transfer, Sink) else 0
        raise AssertionError

    async def _get(self, key: str, sink: Scatter) -> int | None:
        return await self._request(
            "get", f"read {key}", partial(_read_rest, key=key, sink=sink), sink
        )

    async def _read(self, key: str, most: int) -> bytes:
        sink = Whole(f"{self.uri}/{key}", most)
        await self._request("get", f"read {key}", lambda client: client.get(key, None, sink), sink)
        return sink.content()

    async def _put(self, key: str, content: memoryview) -> None:
        source = Source(content)
        self._versioning = await self._request(
            "put", f"put {key}", lambda client: client.put(key, source), source
        )

    async def _put_if_absent(self, key: str, content: memoryview) -> bool:
        if not self.exclusive and not self._reach().client.puts_if_absent:
            raise BackendError(
                f"{self.uri}: this place cannot be asked to put an object only if it is absent, so "
                "only one process may write here; say so with exclusive=True"
            )
        source = Source(content)
        operation = self._operation(f"put {key}")
        if self.exclusive:
            is_ours = await self._is_ours(key, content)
            if is_ours is not None:
                return is_ours
        while True:
            try:
                self._versioning = await self._attempt(
                    operation,
                    "put",
                    lambda client: client.put(key, source, if_absent=not self.exclusive),
                    source,
                )
            except (TakenError, TransientError) as e:
                # "Taken" is no clear answer either: the answer to our attempt may have been lost,
                # and a proxy between may have sent the request again.
                error = e if isinstance(e, TransientError) else TransientError(str(e))
            else:
                return True
            is_ours = await self._is_ours(key, content)
            if is_ours is not None:
                return is_ours
            await self._pause(operation, error)

    async def _is_ours(self, key: str, content: memoryview) -> bool | None:
        """Whether an object has the bytes that this writer puts; None if there is no object."""
        try:
            return await self._read(key, len(content)) == content
        except FileNotFoundError:
            return None
        except DamagedError:  # the object is longer
            return False

    async def _pages(self, prefix: str, *, deep: bool, after: str | None = None) -> list[Page]:
        pages: list[Page] = []
        while True:
            page = await self._page(prefix, deep=deep, after=after)
            pages.append(page)
            after = page.after
            if after is None:
                return pages

    async def _page(self, prefix: str, *, deep: bool, after: str | None = None) -> Page:
        page = await self._request(
            "list", f"list {prefix}", lambda client: client.list(prefix, deep=deep, after=after)
        )
        if after is not None and page.after == after:
            raise UnavailableError(
                f"{self.uri}/{prefix} cannot be listed: the server answers with the same page again"
            )
        return page

    async def _sizes(self, prefix: str) -> dict[str, int]:
        first_page = await self._page(prefix, deep=True)
        if first_page.after is None:
            return dict(first_page.sizes)
        folders = {key[len(prefix) :].partition("/")[0] for key in first_page.sizes}
        if len(folders) >= _FEW_FOLDERS:
            later_pages = await self._pages(prefix, deep=True, after=first_page.after)
            return {key: n for page in (first_page, *later_pages) for key, n in page.sizes.items()}
        level = await self._pages(prefix, deep=False)
        sizes = {key: n for page in level for key, n in page.sizes.items()}
        prefixes = [f"{folder}/" for page in level for folder in page.folders]
        for pages in await together([self._pages(folder, deep=True) for folder in prefixes]):
            sizes |= {key: n for page in pages for key, n in page.sizes.items()}
        return sizes

    async def _delete(self, keys: Sequence[str]) -> dict[str, PlaceError]:
        errors: dict[str, PlaceError] = {}

        async def attempt(client: Client) -> None:
            nonlocal keys
            results = await client.delete(keys)
            errors.update({k: e for k, e in results.items() if isinstance(e, PLACE_ERRORS)})
            again = {k: e for k, e in results.items() if isinstance(e, TransientError)}
            if again:
                keys = list(again)
                raise again[keys[0]]

        action = f"delete {keys[0]}" + " and others" * (len(keys) > 1)
        await self._request("delete", action, attempt)
        return errors

    async def _delete_all(self, keys: Sequence[str]) -> dict[str, PlaceError]:
        step = self._reach().client.deletes
        batches = [keys[i : i + step] for i in range(0, len(keys), step)]
        results = await together([self._delete(batch) for batch in batches])
        return {key: error for errors in results for key, error in errors.items()}


def _inside(key: str) -> str:
    """Return the key of an object relative to the URI. Objects lie in ``casnap-store/``."""
    return f"{STORE_FOLDER}/{key}"


def _outside(key: str) -> str:
    return key.removeprefix(f"{STORE_FOLDER}/")


@dataclass(eq=False)
class _Connected:
    """A client of this process, its server's address, and the semaphore for its requests."""

    client: Client
    server: str
    slots: asyncio.Semaphore


async def _read_rest(client: Client, key: str, sink: Scatter) -> int | None:
    """Read the part of a range that earlier attempts have not received.

    Args:
        client: Makes the request.
        key: The key of the object.
        sink: The range, and where its bytes go.

    Returns:
        As :meth:`Client.get`; None if nothing is left to read.
    """
    if sink.start == sink.stop:
        return None
    return await client.get(key, (sink.start, sink.stop), sink)


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side; return their results.

    The first error cancels the others, and is raised.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_and_wait(*tasks)
