"""The interface of a backend: a place where objects live."""

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
from casnap.errors import BackendError, CasnapError, DamagedError, PlaceError
from casnap.format.records import MAX_SEGMENT_BYTES

TEMPORARY = re.compile("[0-9a-f]{24}")
"""The names of casnap's own files in ``tmp/``. Other files there are not casnap's."""
MAX_MARKER_BYTES = 16 << 10
"""The most bytes of a file that is meant for people."""
MAX_WHOLE_BYTES = MAX_SEGMENT_BYTES
"""The most bytes of an object that is read whole."""
Target: TypeAlias = tuple[int, memoryview]
"""Where a run of an object begins, and the buffer that it is read into."""


class BackendCore(ABC):
    """Objects by key, in folders that are listed one level at a time: the core of each backend.

    - Keys are relative, ``/``-separated, and never climb out.
    - An object is whole or absent: a reader never sees part of one that is being written.
    - ``write`` and ``put_if_absent`` are durable once :meth:`sync` has returned.
    - A backend of this machine retries nothing. A remote one retries after failures that may pass,
      for a bounded time.
    - A missing object raises ``FileNotFoundError``. A failure that says nothing about the object
      raises an :class:`UnavailableError`; all else raises a :class:`BackendError`.
    - Nothing beyond the place itself is read, changed or waited for, whatever lies in it.

    Attributes:
        uri: The URI of this place, as the user would write it.
    """

    uri: str

    @abstractmethod
    def write(self, key: str, content: memoryview | bytes) -> None:
        """Create an object under a key that no other process writes."""

    @abstractmethod
    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Create an object unless the key is taken; return whether it was created.

        A remote backend also returns True for an object with these very bytes: the answer to an
        earlier attempt may have been lost. So if it matters which writer won, the bytes must
        differ.
        """

    @abstractmethod
    def sync(self, *keys: str) -> None:
        """Make durable all that was written here, and some objects of other writers.

        After a failed sync, the next one assumes that nothing was made durable.

        Args:
            keys: The objects of other writers.
        """

    @abstractmethod
    def read(self, key: str, most: int = MAX_WHOLE_BYTES) -> bytes:
        """Return a whole object.

        Args:
            key: The object.
            most: The most bytes that it may have. Anybody may have put an endless object there.

        Raises:
            DamagedError: The object is longer. No more than ``most`` bytes were read.
        """

    @abstractmethod
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        """Fill buffers from runs of an object; return how many bytes there were for each.

        Args:
            key: The object.
            targets: For each run, where it begins, and the buffer.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Return an object's length in bytes."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names right below a folder, unsorted; none if it does not exist."""

    @abstractmethod
    def copy(self, key: str, to: str) -> None:
        """Give an object a second name, which no other process writes. It is as durable as a write.

        Raises:
            FileNotFoundError: The object is not there.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A string that tells this place from every other, and from what was at this URI before.

        Each place has a cache of its own, since a copy of a store claims to be that store. A local
        place is known by its folder and its record as the file system knows them, a remote one by
        URI and endpoint. If one place has several identities, that costs only time.
        """

    # --- what follows from these, and may be done in fewer calls ---

    def size_if_there(self, key: str) -> int | None:
        """Return an object's length in bytes; None if it does not exist."""
        try:
            return self.size(key)
        except FileNotFoundError:
            return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the length in bytes of each object below a folder, at any depth, by its key."""
        sizes: dict[str, int] = {}
        for name in self.names(folder):
            key = f"{folder}/{name}" if folder else name
            try:
                sizes[key] = self.size(key)
            except (FileNotFoundError, BackendError):
                sizes |= self.sizes(key)
        return sizes

    def taken_up(self, folder: str) -> int:
        """Return how many bytes all objects below a folder take up: on a disk, whole blocks."""
        return sum(self.sizes(folder).values())

    def delete_all(self, keys: Iterable[str]) -> dict[str, PlaceError]:
        """Delete objects, if they exist; return the error of each that may not be deleted.

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
        """Return where an object is, for messages."""
        return f"{self.uri}/{key}"


class ReadHints(BackendCore):
    """Faster reads: the place learns of reads early, and hands over each buffer once it is full.

    Attributes:
        has_page_cache: Whether this machine's memory keeps objects that were read. If so, casnap
            needs no cache for them, and reads with as many threads as there are cores.
    """

    has_page_cache: bool = True

    def will_read(self, key: str, runs: Sequence[tuple[int, int]]) -> None:
        """Note that runs of an object are read soon, where that helps. Only the read raises errors.

        Args:
            key: The object.
            runs: Where each begins, and how long it is.
        """

    def filled(self, key: str, targets: Sequence[Target], use: Callable[[int], None]) -> None:
        """Fill buffers as :meth:`read_into` does, and call ``use`` for each as soon as it is full.

        So the caller can look at the bytes while they are in the core's cache, or while others are
        on their way.

        Args:
            key: The object.
            targets: For each run, where it begins, and the buffer.
            use: Called in this thread with the number of each target that is full, in any order;
                not for a target that is cut off. Nothing writes to that buffer any more.
        """
        for number, n in enumerate(self._read_each(key, targets)):
            if n == len(targets[number][1]):
                use(number)

    def _read_each(self, key: str, targets: Sequence[Target]) -> Iterable[int]:
        """Do as :meth:`read_into`; a backend may yield each length once it has read the run."""
        return self.read_into(key, targets)


class BucketRules:
    """Whether a server honours put-if-absent, and what its bucket does by itself.

    Attributes:
        needs_probe: Whether each host that writes has to find out whether put-if-absent is
            honoured: another server, or another state of the bucket, may ignore it.
        exclusive: Whether the user vouches that no other process writes here. A backend that has
            no put-if-absent then looks first, and puts if nothing is there.
    """

    needs_probe: bool = False
    exclusive: bool = False

    @property
    def can_put_if_absent(self) -> bool:
        """Whether the place can be asked to put an object only if it is absent."""
        return True

    @property
    def endpoint(self) -> str:
        """The server and bucket, or the file system, that may or may not honour put-if-absent here.

        Empty where a writer need not find out.
        """
        return ""

    @property
    def versioning(self) -> str:
        """A word that says that the bucket keeps old versions, or did; empty if it never has.

        The last put told it; before the first put, the server is asked. Some servers honour
        put-if-absent only where no versions are kept.
        """
        return ""

    def bucket_warnings(self) -> list[str]:
        """Return which rules of the bucket can hurt a store here, in words.

        Raises:
            UnavailableError: With the reason ``denied``, the rules may not be looked at.
        """
        return []


class Announcements(BackendCore):
    """Which takes are under way, and which files dead writers have left."""

    @contextmanager
    def announced(self, base: int, *, at_once: bool = False) -> Iterator[Callable[[], None]]:
        """Let collectors see, for a ``with`` block, that a take is under way.

        A take that is not seen costs work, never data: a collector may be faster than the take. By
        default collectors see an object in ``tmp/``, once the take has gone on for a while.

        Args:
            base: The number of the root that the take is based on.
            at_once: Whether a short take is to be seen too.

        Yields:
            A function to call now and then while the take goes on.
        """
        announcement = Announcement(self, base, at_once=at_once)
        try:
            yield announcement.renew
        finally:
            announcement.withdraw()

    def announced_bases(self, max_age: float) -> list[int]:
        """Return the roots that takes of living processes are based on, as far as they are seen.

        Args:
            max_age: Takes that were announced longer ago, in seconds, do not count.
        """
        return bases_announced_at(self, max_age)

    def tidy(self, min_age: float) -> int:
        """Delete files that dead writers have left half-written; return how many bytes that freed.

        Args:
            min_age: Files that changed within this many seconds stay.
        """
        return 0


class Markers:
    """Files beside the objects, on which nothing relies: files for people, and copies of roots.

    Attributes:
        keeps_copies: Whether copies of roots are worth it: not where objects are never half lost.
    """

    keeps_copies: bool = False

    def mark(self, key: str, content: bytes) -> None:
        """Put a file that is meant for people; casnap never relies on it.

        Args:
            key: Beside the objects, on a disk and in a bucket.
            content: At most :data:`MAX_MARKER_BYTES`.
        """

    def read_marker(self, key: str) -> bytes:
        """Return the content of a marker file. Raises ``FileNotFoundError`` by default."""
        raise FileNotFoundError(key)

    def unmark(
        self, keys: Iterable[str], is_stale: Callable[[str, bytes], bool]
    ) -> dict[str, CasnapError]:
        """Remove marker files that are stale; return the error of each that cannot be removed.

        Args:
            keys: The files.
            is_stale: Says whether a file is to be removed, given its key and its content.
        """
        return {}

    def keep_copy(self, key: str, content: bytes | None) -> None:
        """Put, or with None remove, the copy of a root, which may be lost at any time."""


class Backend(ReadHints, BucketRules, Announcements, Markers):
    """A place where objects live: the core, which each has, and parts that have defaults.

    Attributes:
        costly_requests: Whether each call takes a round trip, and may be paid for. If so, callers
            list a folder rather than look at each object, ask for much at once, and remember it.
        in_flight: How many calls at once are worth it.
        syncs_folders: Whether each folder that was written to takes time to sync. If so, a take
            writes its packs into one folder.
        max_chunk_bytes: The largest chunks that a store here may have.
        folder: The folder of this machine that holds the objects; None if there is none.
        name_lag: For how many seconds this host may not see what another one has put. Only
            ``put_if_absent`` is then decided as of now: listings, sizes and absence may be old.
    """

    costly_requests: bool = False
    in_flight: int = 1
    syncs_folders: bool = False
    max_chunk_bytes: int = 64 << 20
    folder: Path | None = None
    name_lag: float = 0.0

    @property
    def costs(self) -> Costs:
        """The numbers that depend on whether requests are costly."""
        return REMOTE if self.costly_requests else LOCAL

    @property
    def received_bytes(self) -> int:
        """How many bytes of objects were read so far; 0 where that is not counted."""
        return 0

    @property
    def requests(self) -> Mapping[str, int]:
        """How many requests were made so far, by kind; empty where nothing is counted."""
        return {}

    def appears(self, key: str, still: Callable[[], object]) -> bool:
        """Wait for an object that must exist, but seems absent; return whether it has appeared.

        An object must exist if another object names it, or if a put found its key taken. Where this
        host sees at once what another one has put, this does not wait.

        Args:
            key: The key of the object.
            still: Returns whether the object must still exist. It need not once a newer root does
                not name it.
        """
        return self.name_lag > 0 and wait_for(
            self.where(key), lambda: self.size_if_there(key) is not None, still, self.name_lag
        )

    def is_put(self, key: str) -> bool:
        """Whether the server says that an object exists, whatever this host has cached about it.

        Called only where ``name_lag`` is not 0. False may also mean that the answer is not known.
        """
        return False

    def is_object(self) -> bool:
        """Whether this place is itself an object, and so cannot hold others."""
        return False

    def make(self) -> None:
        """Make the place itself before a store is made in it, where it does not exist yet."""

    def belong(self, check: Callable[[Backend], None]) -> None:
        """Note that the store whose record was just read uses this place.

        At some places another store can take its place, such as in a folder that is moved. Before
        such a place changes anything, it calls ``check`` if that may have happened.

        Args:
            check: Raises a StoreError if the place holds another store.
        """

    def check_changes(self) -> None:
        """Check, before work is done for a change, that this user may change something here.

        Raises:
            StoreError: The store here is only to be read.
        """

    def free_bytes(self) -> int | None:
        """Return how many bytes this user can still write there; None if that is not known."""
        return None


def check_length(label: str, nbytes: int, most: int) -> None:
    """Check the length of an object that is read whole.

    Raises:
        DamagedError: It is longer than it may be.
    """
    if nbytes > most:
        raise DamagedError(
            f"{label} is damaged: it has {nbytes:,} bytes, and such an object {most:,} at most"
        )


@contextmanager
def as_exclusive(backend: Backend, exclusive: bool) -> Iterator[None]:
    """Within a ``with`` block, set whether the user vouches that there is no other writer."""
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
