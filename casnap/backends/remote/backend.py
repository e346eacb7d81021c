"""Objects on another machine. Requests are counted and retried here."""

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

    Safe to use from many threads, and in forked children, which connect anew.

    Args:
        uri: Where the objects are, without a slash at the end.
        connect: Makes a client.
        retries: How patient this backend is.
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
        """Let another process connect anew."""
        made_of = (self.uri, self._connect, self._retries)
        return type(self), made_of, {"exclusive": self.exclusive}

    @property
    @override
    def requests(self) -> Mapping[str, int]:
        """How many attempts were made, by kind: get, put, list, copy, delete."""
        return dict(self._counts)

    @property
    @override
    def received_bytes(self) -> int:
        """How many bytes of objects came from the server, also in failed attempts."""
        return self._received

    @property
    @override
    def identity(self) -> str:
        """The URI and the server's address."""
        return f"{self.uri} {self._reach().server}"

    @property
    @override
    def endpoint(self) -> str:
        """The server's address, and the bucket."""
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
        """Put an object unless there is one; if the answer is unclear, read the one that is there.

        The result is also True if these very bytes are there already: an earlier attempt may have
        put them. So the bytes must be this writer's own.
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
        """Do nothing: an object that a server has taken is durable."""

    @override
    def read(self, key: str, most: int = MAX_WHOLE_BYTES) -> bytes:
        return self._run(self._read(_inside(key), most))

    @override
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        """Read runs by ranges: near ones in one request, long ones in several at once."""
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
        """Return the facts that the server tells about an object, besides its bytes."""
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
        """Copy on the server."""
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
        """Delete the objects that killed processes left in ``tmp/``: probes and notes.

        A probe of put-if-absent may still be in use, so it stays for at least an hour, by the times
        that the server tells. A note stays for a day.
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
        """Return this process's connection; connect first if need be, which may take a while.

        On the event loop this never connects: the thread that began the work there has connected.

        Args:
            refused: A connection that is not to be used any more. It stays until there is a new
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
        """Make a request, again and again while it may still succeed."""
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
        """Wait before the next attempt.

        Raises:
            UnavailableError: There is no next attempt. Later operations are less patient.
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
        """Make a request once; if the credentials are refused, read them anew and try once more.

        They may have expired, or their file may have been replaced since it was read.
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
        """Whether an object has these very bytes; None if there is none."""
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
    """Return where an object is: all of a store lies in one folder, markers beside it."""
    return f"{STORE_FOLDER}/{key}"


def _outside(key: str) -> str:
    return key.removeprefix(f"{STORE_FOLDER}/")


@dataclass(eq=False)
class _Connected:
    """The client of one process, its server, and the semaphore that bounds its requests."""

    client: Client
    server: str
    slots: asyncio.Semaphore


async def _read_rest(client: Client, key: str, sink: Scatter) -> int | None:
    """Get the part of a range that earlier attempts have not received."""
    if sink.start == sink.stop:
        return None
    return await client.get(key, (sink.start, sink.stop), sink)


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run several coroutines at once. The first error cancels the others, and is then raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_and_wait(*tasks)
