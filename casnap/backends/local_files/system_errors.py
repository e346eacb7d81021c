"""The meaning of errors of the operating system, and advice for each: one table."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from casnap.backends.local_files.late_calls import begun
from casnap.errors import (
    PLACE_ERRORS,
    BackendError,
    CasnapError,
    PlaceError,
    StorageFullError,
    UnavailableError,
)

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors that say that nothing is there. Any other error says that the look itself failed."""

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that say that a disk, or a quota, is full."""

_MEMORY = frozenset({errno.ENOMEM, errno.ENOBUFS})
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, *_MEMORY})
"""Errors that say that this host has run out of something, and nothing about the object."""

NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors that a file system without hard links raises when casnap links its own file."""

_DENIED = frozenset({errno.EACCES, errno.EPERM})
_UNREACHABLE = frozenset(
    {
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EREMOTEIO,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ESHUTDOWN,
        errno.ENOLINK,
        errno.ESTALE,
    }
)
_ADVICE = {
    errno.EFBIG: "no file may become that large: raise `ulimit -f`, which bounds the files that "
    "this process writes, or choose a file system for larger ones",
    errno.EROFS: "it is mounted read-only, so a store there can be read, but nothing is stored. "
    "Have it mounted for writing, or choose another place",
    errno.EIO: "the disk, or what serves it, failed; the log of the system (`dmesg`) may say more",
    errno.ESTALE: "the server has it under another handle by now: it was replaced there, or "
    "exported anew. Try again; if that does not help, mount it anew",
}


_KEPT = "earlier snapshots are whole"


def casnap_error(error: OSError, subject: str, kept: str = _KEPT) -> PlaceError:
    """Return casnap's error for an error of the operating system, with advice.

    Args:
        error: The error of the system.
        subject: The path that was used, for the message.
        kept: For the message about a full disk: a clause that says what was not harmed.
    """
    number, text = error.errno, error.strerror or str(error)
    if number in NO_SPACE:
        lack = "quota" if number == errno.EDQUOT else "space"
        return StorageFullError(
            f"no {lack} left to write {subject}; {kept}. Free some space, then try again"
        )
    if number in EXHAUSTED:
        cause = "no memory left" if number in _MEMORY else "too many files open (`ulimit -n`)"
        return UnavailableError(
            f"{subject}: {text}; nothing is known to be wrong with it. This process or host has "
            f"{cause}; then try again",
            reason="exhausted",
        )
    if number in _UNREACHABLE:
        why = _ADVICE.get(number, "the server of this file system does not answer")
        return UnavailableError(
            f"{subject}: {text}; {why}. Nothing is known to be wrong with what it holds",
            reason="unreachable",
        )
    if number == errno.EISDIR:
        return BackendError(f"{subject} is a folder, not a file")
    if number in _DENIED:
        return BackendError(
            f"{subject}: {text}; may this user have it? To read a store, a user needs the right to "
            "read all its files and to enter all its folders; to write to it, also the right to "
            "write there. After chown, chgrp or chmod of a folder, do the same with -R"
        )
    advice = _ADVICE.get(number or 0)
    return BackendError(f"{subject}: {text}; {advice}" if advice else f"{subject}: {text}")


def no_links_error(error: OSError, subject: str) -> BackendError:
    """Return the error to raise when a file system refuses the hard link of a new file.

    Args:
        error: The error of the system.
        subject: The path of the file, for the message.
    """
    return BackendError(
        f"{subject}: {error.strerror}; this file system has no hard links (as exFAT, FAT and "
        "mounts of Google Drive), by which a store gives its files their names. Have the store on "
        "another disk or in a bucket; its whole folder can be copied here to be read"
    )


def gone_error(uri: str) -> BackendError:
    """Return the error to raise when the folder of an open store has disappeared."""
    return BackendError(
        f"{uri} is gone, or was moved, since it was opened; open it anew, where it is now"
    )


@contextmanager
def translated(
    subject: str | Callable[[OSError], str], kept: str | Callable[[], str] = _KEPT
) -> Iterator[None]:
    """Turn errors of the system in a block into casnap's, except ``FileNotFoundError``.

    Args:
        subject: The path that is used, for messages; or a function that returns it for an error.
        kept: As for :func:`casnap_error`; or a function that returns it after an error.
    """
    done = begun(subject) if isinstance(subject, str) else None
    try:
        yield
    except (FileNotFoundError, CasnapError):
        raise
    except OSError as e:
        if e.errno is None:
            # This is no error of the system: a signal handler has raised it, such as an alarm's.
            raise
        about = subject if isinstance(subject, str) else subject(e)
        raise casnap_error(e, about, kept if isinstance(kept, str) else kept()) from e
    finally:
        if done is not None:
            done()


def is_stale(error: BaseException) -> bool:
    """Whether an error says that the server has replaced a file handle by another one (ESTALE)."""
    cause = error.__cause__ if isinstance(error, PLACE_ERRORS) else error
    return isinstance(cause, OSError) and cause.errno == errno.ESTALE


def is_of_the_place(error: BaseException) -> bool:
    """Whether an error of casnap means that looking at a place failed.

    If so, it is not known whether the object is there. A ``BackendError`` that no error of the
    system has caused means something else: a folder, a link or a pipe is where a file should be.
    """
    cause = error.__cause__
    return isinstance(error, UnavailableError) or (
        isinstance(error, BackendError)
        and isinstance(cause, OSError)
        and cause.errno not in {*ABSENT, errno.EISDIR}
    )
