"""The interface of a backend.

A backend keeps objects at one place, such as a folder or a bucket.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from casnap.backends.announcement import Announcement, bases_announced_at
from casnap.backends.costs import LOCAL, REMOTE, Costs
from casnap.backends.late_names import wait_for
from casnap.errors import BackendError, CasnapError, PlaceError
from casnap.format.records import MAX_SEGMENT_BYTES

TEMPORARY = re.compile("[0-9a-f]{24}")
"""The names of casnap's own files in ``tmp/``. Other files there are not casnap's."""
MAX_MARKER_BYTES = 16 << 10
"""The most bytes of a marker, a file that people read and that no code relies on."""
MAX_WHOLE_BYTES = MAX_SEGMENT_BYTES
"""The most bytes that :meth:`BackendCore.read` reads of an object by default."""
Target: TypeAlias = tuple[int, memoryview]
"""A run of bytes of an object to read: the offset of its first byte, and the buffer for it."""


class BackendCore(ABC):
    """The core of a backend: objects by key, in folders that can be listed.

    - Keys are relative and ``/``-separated, and have no ``..``.
    - An object is whole or absent: no reader sees a part of an object that is still being written.
    - ``write`` and ``put_if_absent`` are durable once :meth:`sync` has returned.
    - A backend of this machine retries nothing. A remote one retries after failures that may pass,
      for a bounded time.
    - A missing object raises ``FileNotFoundError``. A failure that says nothing about the object
      raises an :class:`UnavailableError`; all else raises a :class:`BackendError`.
    - The backend reads, changes and waits for nothing outside its place, even if somebody has put a
      link or a pipe into the place.

    Attributes:
        uri: The URI of the place, as the user would write it.
    """

    uri: str

    @abstractmethod
    def write(self, key: str, content: memoryview | bytes) -> None:
        """Create an object under a new key.

        The caller has invented the key, so no other process writes it.
        """

    @abstractmethod
    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Create an object unless its key is taken; return whether the object was created.

        A remote backend also returns True if the object has these very bytes already, since the
        answer to an earlier attempt of this call may have been lost. So two writers that must not
        both win have to put different bytes.
        """

    @abstractmethod
    def sync(self, *keys: str) -> None:
        """Make durable all writes through this backend, and some objects of other writers.

        After a failed sync, the next one assumes that nothing was made durable.

        Args:
            keys: The objects of other writers.
        """

    @abstractmethod
    def read(self, key: str, most: int = MAX_WHOLE_BYTES) -> bytes:
        """Return the bytes of a whole object.

        Args:
            key: The key of the object.
            most: The most bytes to read, since somebody may have put an endless object.

        Raises:
            DamagedError: The object is longer than ``most``. No more than ``most`` bytes were read.
        """

    @abstractmethod
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        """Read runs of bytes of an object into buffers; return the number of bytes read into each.

        Args:
            key: The key of the object.
            targets: For each run, the offset of its first byte, and the buffer. A buffer is filled
                only in part if the object ends before the run does.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Return an object's length in bytes."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names right below a folder, unsorted; none if the folder does not exist."""

    @abstractmethod
    def copy(self, key: str, to: str) -> None:
        """Give an object a second key. The result is as durable as a ``write``.

        Args:
            key: The key of the object.
            to: The second key. The caller has invented it, so no other process writes it.

        Raises:
            FileNotFoundError: The object is not there.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object. If it does not exist, do nothing."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A string that no other place has, and no earlier place at the same URI.

        A copy of a store has the same store id as the original. So each cache is kept for an
        identity, not for a store id. The identity of a local place comes from its folder and the
        file of its ``casnap.json``; the identity of a remote place comes from URI and endpoint. If
        one place has several identities, this costs time, never correctness.
        """

    # --- what follows from these, and may be done in fewer calls ---

    def size_if_there(self, key: str) -> int | None:
        """Return an object's length in bytes; None if it does not exist."""
        try:
            return self.size(key)
        except FileNotFoundError:
            return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the length in bytes of each object below a folder, at any depth, by key."""
        sizes: dict[str, int] = {}
        for name in self.names(folder):
            key = f"{folder}/{name}" if folder else name
            try:
                sizes[key] = self.size(key)
            except (FileNotFoundError, BackendError):
                sizes |= self.sizes(key)
        return sizes

    def taken_up(self, folder: str) -> int:
        """Return the space that all objects below a folder take up, in bytes.

        A disk counts whole blocks.
        """
        return sum(self.sizes(folder).values())

    def delete_all(self, keys: Iterable[str]) -> dict[str, PlaceError]:
        """Delete objects; return an error for each that this user may not delete, by its key.

        An object that does not exist counts as deleted.

        Raises:
            PlaceError: Deleting failed for another reason. Some objects may be gone.
        """
        refused: dict[str, PlaceError] = {}
        for key in keys:
            try:
                self.delete(key)
            except BackendError as e:
                if not isinstance(e.__cause__, PermissionError):
                    raise
                refused[key] = e
        return refused

    def where(self, key: str) -> str:
        """Return the full path or URI of an object, for messages."""
        return f"{self.uri}/{key}"


class ReadHints(BackendCore):
    """The part of a backend that can make reads faster.

    Callers announce reads, and can use each buffer as soon as it is full.

    Attributes:
        has_page_cache: Whether this machine's memory caches objects that were read. If so, casnap
            needs no cache for them, and reads with as many threads as there are cores.
    """

    has_page_cache: bool = True

    def will_read(self, key: str, runs: Sequence[tuple[int, int]]) -> None:
        """Tell the backend that a caller will soon read runs of bytes of an object.

        The backend may begin to load them. This call raises no error; the later read does.

        Args:
            key: The key of the object.
            runs: For each run, the offset of its first byte, and its length.
        """

    def warm(self, lengths: Mapping[str, int]) -> None:
        """Begin to load new objects into this host's memory, for readers that come soon.

        This ends the loading that an earlier call began. It raises no error, and does not wait.

        Args:
            lengths: The key of each object → its length in bytes; empty only to end the earlier
                loading.
        """

    def filled(self, key: str, targets: Sequence[Target], use: Callable[[int], None]) -> None:
        """Fill buffers as :meth:`read_into` does; call a function for each once it is full.

        So the caller can work on the bytes while they are still in the processor's cache, or while
        other bytes are on their way.

        Args:
            key: The key of the object.
            targets: For each run, the offset of its first byte, and the buffer.
            use: Called, in this thread and in any order, with the index of each target whose buffer
                is full. Nothing writes to this buffer any more. A target that ends beyond the end
                of the object is left out.
        """
        for number, n in enumerate(self._read_each(key, targets)):
            if n == len(targets[number][1]):
                use(number)

    def _read_each(self, key: str, targets: Sequence[Target]) -> Iterable[int]:
        """Read as :meth:`read_into` does; yield the number of bytes read into each buffer.

        A backend may yield a number before it has filled the next buffer.
        """
        return self.read_into(key, targets)


class BucketRules:
    """The part of a backend that says how its server and bucket behave.

    Attributes:
        needs_probe: Whether each host that writes must first probe whether put-if-absent is
            honoured. Another server, or a bucket with other settings, may ignore the condition.
        exclusive: Whether the user vouches that no other process writes to this place. If so,
            ``put_if_absent`` of a remote backend first looks whether the object is absent, and then
            puts it without a condition.
    """

    needs_probe: bool = False
    exclusive: bool = False

    @property
    def can_put_if_absent(self) -> bool:
        """Whether the place offers a put with the condition that the object is absent."""
        return True

    @property
    def endpoint(self) -> str:
        """A text that names the server and bucket, or the file system, to probe for put-if-absent.

        It is "" where no probe is needed.
        """
        return ""

    @property
    def versioning(self) -> str:
        """A word if the bucket keeps, or once kept, old versions of objects; "" if it never did.

        The word comes from the server's answer to the last put. Before the first put, the server is
        asked. Some servers honour put-if-absent only where no versions are kept.
        """
        return ""

    def bucket_warnings(self) -> list[str]:
        """Return warnings, in words, about rules of the bucket that can hurt a store in it.

        Raises:
            UnavailableError: This user may not look at the rules (reason ``denied``), or the server
                could not be asked.
        """
        return []


class Announcements(BackendCore):
    """The part of a backend that shows which takes are under way, and tidies ``tmp/``."""

    @contextmanager
    def announced(self, base: int, *, at_once: bool = False) -> Iterator[Callable[[], None]]:
        """Let collectors see, during a ``with`` block, that a take is under way.

        A collector that does not see the take may delete what the take relies on. The take then has
        more work, but no data is lost. By default the take is shown by a note in ``tmp/``, which is
        put once the take has gone on for a while.

        Args:
            base: The number of the root that the take is based on.
            at_once: Whether to show the take at once, even if it may be short.

        Yields:
            A function that the take calls from time to time while it goes on.
        """
        announcement = Announcement(self, base, at_once=at_once)
        try:
            yield announcement.renew
        finally:
            announcement.withdraw()

    def announced_bases(self, max_age: float) -> list[int]:
        """Return which roots the announced takes are based on, by number.

        Args:
            max_age: How old an announcement may be to count, in seconds.
        """
        return bases_announced_at(self, max_age)

    def tidy(self, min_age: float) -> int:
        """Delete files that dead writers have left in ``tmp/``; return how many bytes this freed.

        Args:
            min_age: Files that changed within this many seconds stay.
        """
        return 0


class Markers:
    """The part of a backend that keeps markers (files for people) and spare copies of roots.

    Nothing relies on these files.

    Attributes:
        keeps_copies: Whether to keep spare copies of roots. A place that never loses a part of an
            object needs none.
    """

    keeps_copies: bool = False

    def mark(self, key: str, content: bytes) -> None:
        """Put a file that is meant for people.

        Args:
            key: The key of the file, relative to the store's own folder, beside ``casnap-store/``.
            content: The content, at most :data:`MAX_MARKER_BYTES`.
        """

    def read_marker(self, key: str) -> bytes:
        """Return the content of a file that :meth:`mark` has put.

        Raises:
            FileNotFoundError: The file does not exist, or the backend keeps no markers.
        """
        raise FileNotFoundError(key)

    def unmark(
        self, keys: Iterable[str], is_stale: Callable[[str, bytes], bool]
    ) -> dict[str, CasnapError]:
        """Remove stale marker files; return an error for each that stays, by its key.

        Args:
            keys: The keys of the files.
            is_stale: Returns whether a file is to be removed, given its key and its content.
        """
        return {}

    def keep_copy(self, key: str, content: bytes | None) -> None:
        """Put the spare copy of a root, or remove it. The copy need not be durable.

        Args:
            key: The key of the copy.
            content: The bytes of the root; None to remove the copy.
        """


class Backend(ReadHints, BucketRules, Announcements, Markers):
    """A backend: the core, which each backend must implement, and parts with default methods.

    Attributes:
        costly_requests: Whether each call takes a round trip to a server, and may have to be paid
            for. If so, callers list a folder rather than look at each object, ask for much at once,
            and remember the answers.
        in_flight: How many calls at once make the best use of the place.
        syncs_folders: Whether it takes time to sync each folder with new files. If so, a take
            writes its packs into one folder.
        max_chunk_bytes: The largest chunk size that a store at this place may have.
        folder: The folder of this machine that holds the objects; None if there is none.
        name_lag: For how many seconds this host may not see an object that another host has put. If
            this is not 0, listings, sizes and absence may be out of date; only ``put_if_absent``
            decides by the present state.
    """

    costly_requests: bool = False
    in_flight: int = 1
    syncs_folders: bool = False
    max_chunk_bytes: int = 64 << 20
    folder: Path | None = None
    name_lag: float = 0.0

    @property
    def costs(self) -> Costs:
        """The numbers for a bucket if requests are costly here; else the numbers for a disk."""
        return REMOTE if self.costly_requests else LOCAL

    @property
    def received_bytes(self) -> int:
        """How many bytes of objects were read so far; 0 if the backend does not count them."""
        return 0

    @property
    def requests(self) -> Mapping[str, int]:
        """How many requests were made so far, by kind; empty if they are not counted."""
        return {}

    def appears(self, key: str, still: Callable[[], object]) -> bool:
        """Wait for an object that must exist, but seems absent; return whether it has appeared.

        An object must exist if another object names it, or if ``put_if_absent`` found its key
        taken. If this host sees at once what other hosts put, the call returns False without
        waiting.

        Args:
            key: The key of the object.
            still: Returns whether the object must still exist. It need not if a newer root no
                longer names the object.
        """
        return self.name_lag > 0 and wait_for(
            self.where(key), lambda: self.size_if_there(key) is not None, still, self.name_lag
        )

    def is_put(self, key: str) -> bool:
        """Whether the server says that an object exists, whatever this host has cached about it.

        Callers ask this only if ``name_lag`` is not 0. False may also mean that the server gave no
        answer.
        """
        return False

    def is_object(self) -> bool:
        """Whether an object has the place's own URI. Such a place cannot hold a store."""
        return False

    def make(self) -> None:
        """Create the place itself, such as its folder, if it does not exist yet."""

    def belong(self, check: Callable[[Backend], None]) -> None:
        """Note that this backend belongs to the store whose ``casnap.json`` was read last.

        At some places another store can later lie at the same path, for example after folders were
        moved. Whenever this may be so, the backend calls ``check`` before it changes anything.

        Args:
            check: Raises a StoreError if the place holds another store.
        """

    def check_changes(self) -> None:
        """Check that this user may change the store here, before a caller begins work for a change.

        Raises:
            StoreError: This user may only read the store.
        """

    def free_bytes(self) -> int | None:
        """Return how many bytes this user can still write to the place; None if unknown."""
        return None


@contextmanager
def as_exclusive(backend: Backend, exclusive: bool) -> Iterator[None]:
    """Set ``backend.exclusive`` for a ``with`` block, and restore it afterwards."""
    was = backend.exclusive
    if was == exclusive:
        # Another thread may be within such a block, and this one must not undo its setting.
        yield
        return
    backend.exclusive = exclusive
    try:
        yield
    finally:
        backend.exclusive = was
