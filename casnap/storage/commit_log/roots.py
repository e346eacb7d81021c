"""The commit log: small numbered objects, the roots. The newest root says what the store holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from casnap.backends.base import Backend
from casnap.errors import (
    PLACE_ERRORS,
    BackendError,
    CasnapError,
    DamagedError,
    NotAStoreError,
    StorageFullError,
    StoreError,
    UnavailableError,
    UnclearCommitError,
    UnsupportedFormatError,
)
from casnap.format.digest import DIGEST_SIZE
from casnap.format.records import (
    ID_SIZE,
    MAX_ROOT_BYTES,
    Root,
    decode,
    encode,
    id_from_name,
    root_key,
    seal,
    unseal,
)
from casnap.runtime.sizes import size
from casnap.runtime.threads import run_both
from casnap.version import __version__

_log = logging.getLogger("casnap")
FEATURES: frozenset[str] = frozenset()
"""The features of stores that this version can read and write."""
WRITER = f"casnap {__version__}"
MOST_ROOTS = 1 << 48
"""Each root number is less than this: the ids of packs and segments hold one in 6 bytes."""
# The folder with a copy of the newest root, which alone is needed to read the store.
COPIES = "roots/copies"


def newest_root(backend: Backend, cached: Root | None = None, *, stands: bool = False) -> Root:
    """Return the newest root.

    A listing of a bucket may be out of date, so the function also looks for roots after the last
    listed one. Roots are never removed, so a missing number means damage. If the newest root is
    damaged or lost, its copy is read.

    Args:
        backend: The backend of the store.
        cached: A root that was the newest before. If it still exists, no listing is made. It exists
            unless the store was rolled back.
        stands: Whether the caller has just seen that ``cached`` still exists.

    Raises:
        NotAStoreError: There is no root.
        DamagedError: Neither the newest root nor its copy can be read. An older root is no
            substitute.
        UnsupportedFormatError: The root has a read feature that this version does not know.
    """
    root, newer = _first_look(backend, cached, stands=stands)
    first_seq = root.seq
    while newer is not None:
        root = newer
        # So many newer roots are cheaper to list than to read one by one.
        if root.seq == first_seq + backend.costs.probes:
            root = max(root, last_listed(backend), key=lambda r: r.seq)
        newer = _after(backend, root)
    if cached is not None and root.seq < cached.seq and _appears(backend, cached.seq):
        return newest_root(backend, cached)
    if unknown := set(root.read_features) - FEATURES:
        raise UnsupportedFormatError(_lacks(f"to read {backend.uri}", unknown))
    return root


def _first_look(backend: Backend, cached: Root | None, *, stands: bool) -> tuple[Root, Root | None]:
    """Return a root that may be the newest, and the root after it, or None.

    On a remote store, both are read at the same time.

    Args:
        backend: The backend of the store.
        cached: A root that was the newest before, if one is known.
        stands: Whether the caller has just seen that ``cached`` still exists.
    """
    if cached is not None and stands:
        return cached, _after(backend, cached)
    if backend.costs.free_looks:
        root = cached if cached is not None and _stands(backend, cached) else last_listed(backend)
        return root, _after(backend, root)
    if cached is not None:
        following = partial(_read_if_there, backend, cached.seq + 1)
        stands_there, newer = run_both(partial(_stands, backend, cached), following)
        if stands_there:
            return cached, newer
    return root_and_next(backend, _last_seq(backend))


def root_and_next(backend: Backend, seq: int) -> tuple[Root, Root | None]:
    """Return the root of a number, which must exist, and the root after it, or None.

    Both are read at the same time.

    Raises:
        DamagedError: A root is damaged, or the first one is missing.
    """
    return run_both(partial(named_root, backend, seq), partial(_read_if_there, backend, seq + 1))


def _after(backend: Backend, root: Root) -> Root | None:
    if backend.name_lag:
        # Asked for an absent root by name, a client keeps that it is absent, and hides the root
        # that another host then puts. A listing leaves no such trace, but sshfs keeps listings. So
        # the server is asked too, which leaves no trace either.
        seq = _last_seq(backend)
        if seq <= root.seq and backend.is_put(root_key(root.seq + 1)):
            seq = root.seq + 1
        newer = named_root(backend, seq) if seq > root.seq else None
    else:
        newer = _read_if_there(backend, root.seq + 1)
    return newer or _rolled_back(backend, root)


def _lacks(doing: str, features: Collection[str]) -> str:
    return (
        f"{doing} needs features that this casnap lacks: {', '.join(sorted(features)):.500}; "
        "update casnap"
    )


def check_writable(uri: str, features: Collection[str], doing: str = "write to") -> None:
    """Check that this version of casnap may write to a store.

    Args:
        uri: The URI of the store, for the message.
        features: The write features of the store.
        doing: What the caller wants to do, for the message.

    Raises:
        UnsupportedFormatError: This version does not know a feature.
    """
    if unknown := set(features) - FEATURES:
        raise UnsupportedFormatError(_lacks(f"to {doing} {uri}", unknown))


def _stands(backend: Backend, root: Root) -> bool:
    try:
        return _read_if_there(backend, root.seq) == root
    except (DamagedError, BackendError):
        # The root is damaged. It may be an older root by now, which has no copy.
        return False


def _rolled_back(backend: Backend, root: Root) -> Root | None:
    """Return a newer root that was lost, from its copy; None if no root was lost.

    If a store was copied while others wrote to it, the result may have the copy of a root, but not
    the files that this root names. Such a copy does not count.

    Args:
        backend: The backend of the store.
        root: The last root that exists.

    Raises:
        DamagedError: A root was lost, and its copy is damaged.
    """
    if not backend.keeps_copies:
        return None
    seq = max(_numbers(backend, COPIES), default=-1)
    if seq <= root.seq:
        return None
    copy = _copy_of(backend, seq)
    # The root may have been put between the two looks, since a copy is put after its root.
    read = _read_if_there if isinstance(copy, Root) else _read_named
    root_there = read(backend, seq)
    if root_there is not None or copy is None:
        return root_there
    if not isinstance(copy, Root):
        raise DamagedError(
            f"{backend.where(root_key(seq))} is lost, and its copy cannot be read: {copy}. Put the "
            f"root back from a backup. To go back to root {root.seq} instead, and lose what was "
            f"committed after it, move {backend.where(_copy_key(seq))} away"
        ) from copy
    segments = {id_from_name(name) for name in backend.names("index")}
    return copy if all(ref.id in segments for ref in copy.segments) else None


def last_listed(backend: Backend) -> Root:
    """Return the last root in a listing. If listings are out of date, there may be newer roots.

    Raises:
        NotAStoreError: There is no root.
        DamagedError: The root cannot be read.
    """
    return named_root(backend, _last_seq(backend))


def _last_seq(backend: Backend) -> int:
    folders = _numbers(backend, "roots")
    seqs = _numbers(backend, f"roots/{max(folders)}") if folders else []
    if not seqs and folders and max(folders) > 0:
        # A crash may leave the folder of the next thousand empty.
        seqs = _numbers(backend, f"roots/{max(folders) - 1}")
    if not seqs and backend.name_lag and backend.is_put(root_key(0)):
        return 0
    if not seqs:
        raise NotAStoreError(
            f"{backend.uri} holds no root; its creation was cut off or it is damaged"
        )
    return max(seqs)


def roots_before(backend: Backend, seq: int) -> Iterator[Root]:
    """Yield the readable roots whose numbers are less than ``seq``, the newest first."""
    for folder in sorted(_numbers(backend, "roots"), reverse=True):
        for number in sorted(_numbers(backend, f"roots/{folder}"), reverse=True):
            root: Root | None = None
            if number < seq:
                with suppress(FileNotFoundError, DamagedError, BackendError):
                    root = read_root(backend, number)
            if root is not None:
                yield root


def named_root(backend: Backend, seq: int) -> Root:
    """Return a root that must exist: a listing has it, or a put has found its number taken.

    Raises:
        DamagedError: The root is damaged or missing.
    """
    root = _read_named(backend, seq)
    if root is None:
        raise DamagedError(
            f"{backend.where(root_key(seq))} is listed, but not there; roots are never "
            "removed, so the store is damaged, or only a part of it is here"
        )
    return root


def _read_named(backend: Backend, seq: int) -> Root | None:
    """Return a root that must exist, or its copy if it is damaged; None if it is missing."""
    root = _read_if_there(backend, seq)
    return _read_if_there(backend, seq) if root is None and _appears(backend, seq) else root


def _appears(backend: Backend, seq: int) -> bool:
    """Wait for a root that must exist, but is not seen yet; return whether it has appeared."""
    return backend.appears(root_key(seq), partial(backend.names, "roots"))


def _read_if_there(backend: Backend, seq: int) -> Root | None:
    """Return a root, or its copy if the root is damaged; None if no root has this number.

    Raises:
        DamagedError: The root is damaged, and has no readable copy.
        BackendError: The root cannot be read, and has no readable copy.
    """
    try:
        return read_root(backend, seq)
    except FileNotFoundError:
        return None
    except (DamagedError, BackendError):
        copy = _copy_of(backend, seq)
        if not isinstance(copy, Root):
            raise
        return copy


def _copy_of(backend: Backend, seq: int) -> Root | DamagedError | BackendError | None:
    """Return the copy of a root, or the error of reading the copy; None if there is no copy."""
    if not backend.keeps_copies:
        return None
    try:
        return _read_either(backend, _copy_key(seq), seq)
    except FileNotFoundError:
        return None
    except (DamagedError, BackendError) as e:
        return e


def _copy_key(seq: int) -> str:
    return f"{COPIES}/{seq}"


def _keep_copy(backend: Backend, seq: int, content: bytes) -> None:
    """Put a copy of a root, and remove the copies of older roots. A failure is only logged.

    Args:
        backend: The backend of the store.
        seq: The number of the root.
        content: The bytes of the root.
    """
    if not backend.keeps_copies:
        return
    try:
        backend.keep_copy(_copy_key(seq), content)
        older_copies = [number for number in _numbers(backend, COPIES) if number < seq]
    except (CasnapError, OSError) as e:
        _log.debug("%s: root %d has no copy: %s", backend.uri, seq, e)
        return
    for older in older_copies:
        try:
            backend.keep_copy(_copy_key(older), None)
        except (CasnapError, OSError) as e:
            # The copy may be another user's, in a sticky folder.
            _log.debug("%s: the copy of root %d stays: %s", backend.uri, older, e)


def release_reserve(backend: Backend) -> None:
    """Remove the copies of roots, whose disk space is a reserve for a full disk.

    Call this only for a commit that frees space or deletes snapshots. The next root gets a copy
    again.
    """
    if backend.keeps_copies:
        for number in _numbers(backend, COPIES):
            backend.keep_copy(_copy_key(number), None)


def with_advice(error: StorageFullError, root: Root) -> StorageFullError:
    """Add advice to an error of a full disk, when even a commit that deletes snapshots has no room.

    Args:
        error: The error.
        root: The newest root of the store.
    """
    # The index may have to be written anew, with some 50 bytes for each chunk.
    nbytes = (1 << 20) + 64 * sum(ref.weight for ref in root.segments)
    return StorageFullError(
        f"{error}. For this, {size(nbytes)} are enough: delete, or move, any other file of the disk"
    )


def _numbers(backend: Backend, folder: str) -> list[int]:
    names = backend.names(folder)
    return [int(n) for n in names if n.isascii() and n.isdigit() and str(int(n)) == n]


def read_root(backend: Backend, seq: int) -> Root:
    """Read the root of a number.

    Raises:
        FileNotFoundError: No root has this number.
        DamagedError: The root is damaged.
    """
    return _read_either(backend, root_key(seq), seq)


def _read_either(backend: Backend, key: str, seq: int) -> Root:
    data = backend.read(key, MAX_ROOT_BYTES)
    name = backend.where(key)
    body = unseal(b"r", data, name)
    root = decode(body, Root, name)
    problem = _problem(root, seq)
    if problem:
        raise DamagedError(f"{name} {problem}")
    # A writer would drop unknown fields, so their names count as write features.
    more = decode(body, dict[str, msgspec.Raw], name).keys() - set(Root.__struct_fields__)
    features = root.write_features
    return (
        msgspec.structs.replace(root, write_features=(*features, *sorted(more))) if more else root
    )


def sealed_root(root: Root) -> bytes:
    """Return the sealed bytes of a root."""
    return seal(b"r", encode(root))


def _problem(root: Root, seq: int) -> str | None:
    """Return what is wrong with a decoded root, as words that follow its name; None if nothing is.

    Args:
        root: The root.
        seq: The number by which the root was read.
    """
    if root.seq != seq or seq >= MOST_ROOTS:
        return f"says that it is root {root.seq}"
    if any(
        len(ref.id) != ID_SIZE or not 0 <= ref.deltas <= ref.count < 1 << 32
        for ref in root.segments
    ):
        return "has a malformed segment id or record count"
    if len({ref.id for ref in root.segments}) < len(root.segments):
        return "names a segment twice"
    if not 0 <= root.fence <= seq:
        return f"has the fence {root.fence}"
    if any(len(p) != ID_SIZE or not 0 <= at <= seq for p, at in root.condemned.items()):
        return "has a malformed condemned pack"
    if len(root.lost) % DIGEST_SIZE:
        return "has a malformed list of lost digests"
    copies = root.copies.items()
    if any(len(c) != ID_SIZE or len(copy.parts.digest) != DIGEST_SIZE for c, copy in copies):
        return "has a malformed unfinished copy"
    return None


def next_root(uri: str, root: Root, commit: bytes, **changes: Any) -> Root:
    """Return the next root: ``root`` with a new number, and some fields changed.

    Args:
        uri: The URI of the store, for messages.
        root: The root before.
        commit: The id of the new commit.
        **changes: The fields to change.

    Raises:
        UnsupportedFormatError: The store has a write feature that this version does not know.
        StoreError: ``root`` has the last number that a root can have.
    """
    check_writable(uri, root.write_features)
    if root.seq + 1 >= MOST_ROOTS:
        raise StoreError(
            f"{uri}: root {root.seq} has the last number that a root can have, so nothing can be "
            "committed after it. The store can still be read; `casnap cp` copies it to a new store"
        )
    return msgspec.structs.replace(
        root, seq=root.seq + 1, commit=commit, time=time.time(), writer=WRITER, **changes
    )


def put_root(backend: Backend, root: Root) -> bool:
    """Put a root durably, if its number is free; return whether the store has this root now.

    If the number is taken, or the backend fails, the root of that number is read. It may be this
    very root, if the answer to the put was lost.

    Raises:
        UnclearCommitError: It is not known whether the store has the root, or whether the root is
            durable.
        StoreError: The place does not honour put-if-absent now, or the root is too large.
    """
    from casnap.storage.commit_log.put_if_absent_probe import recheck_put_if_absent

    content = sealed_root(root)
    # The puts before this one have shown whether the bucket keeps versions.
    recheck_put_if_absent(backend)
    stands = _put_content(backend, root, content)
    if stands:
        _keep_copy(backend, root.seq, content)
    return stands


def _put_content(backend: Backend, root: Root, content: bytes) -> bool:
    key = root_key(root.seq)
    if len(content) > MAX_ROOT_BYTES:
        raise StoreError(
            f"{backend.uri}: the next root would have {len(content):,} bytes, more than "
            f"{MAX_ROOT_BYTES:,}; too much is condemned, or lost, at once. Delete the snapshots "
            "that `casnap check` says are hurt, or collect garbage with --grace 0"
        )
    if root.seq % 1000 == 0:
        # The root before lies in another folder. A crash must not lose it and keep the new root.
        backend.sync(root_key(root.seq - 1))
    is_ours = _now_stands(backend, root, key, content)
    if is_ours:
        _make_durable(backend, key)
    return is_ours


def _now_stands(backend: Backend, root: Root, key: str, content: bytes) -> bool:
    failure: Exception | None = None
    try:
        if backend.put_if_absent(key, content):
            return True
    except Exception as e:  # noqa: BLE001 - after any error, the root that is there now decides
        failure = e
    # After a failed put the number may be free; without a failure, it is taken.
    read = _read_named if failure is None else _read_if_there
    try:
        root_there = read(backend, root.seq)
    except (*PLACE_ERRORS, OSError) as e:
        reason = e.reason if isinstance(e, UnavailableError) else "other"
        text = f"{backend.where(key)} was perhaps put, and cannot be read: {e}"
        raise UnclearCommitError(text, reason) from (failure or e)
    if root_there is not None:
        return root_there.commit == root.commit
    if isinstance(failure, UnavailableError) and failure.reason == "unreachable":
        # The server may still carry out the put that it has not answered.
        raise UnclearCommitError(f"{failure}; it is perhaps put", failure.reason) from failure
    raise failure or DamagedError(f"{backend.where(key)} is taken, but cannot be read")


def _make_durable(backend: Backend, key: str) -> None:
    """Sync a new root. There is one try: after a failed sync, a sync that succeeds proves nothing.

    Raises:
        UnclearCommitError: The root may be lost if the machine crashes.
    """
    try:
        backend.sync()
    except (CasnapError, OSError) as e:
        # Not StorageFullError, which would mean that there is no root.
        raise UnclearCommitError(
            f"{backend.where(key)} was put, but may be lost if the machine crashes: {e}. The next "
            "commit, such as that of a take, makes it last"
        ) from e
