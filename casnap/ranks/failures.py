"""Failures of an operation of several ranks: the ranks at fault, and their errors as text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from casnap import errors
from casnap.errors import CasnapError, RankError, Reason, UnavailableError
from casnap.format.names import rank_names

STORE_SILENT = (
    "the store of the process group does not answer: the process that keeps it, rank 0 if no "
    "launcher does, died or hangs"
)


class ErrorText(msgspec.Struct, array_like=True, frozen=True):
    """An error in the form in which a rank sends it to others.

    Attributes:
        kind: The name of its type.
        text: Its message.
        reason: The reason of an UnavailableError.
    """

    kind: str
    text: str
    reason: Reason = "other"


class Failure(msgspec.Struct, array_like=True):
    """Why an operation ended early.

    Attributes:
        ranks: The ranks at fault; empty if they are not known.
        reason: What happened to them, in words.
        error: The error of the rank at fault, if it raised one.
    """

    ranks: tuple[int, ...]
    reason: str
    error: ErrorText | None = None


class LinkFailedError(Exception):
    """The ranks cannot be connected, or the process group's store does not answer.

    Attributes:
        failure: The ranks at fault, and what happened.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def damage_text(senders: Sequence[int], receiver: int) -> str:
    """Return the message for bytes that were damaged on their way from other ranks."""
    return (
        f"what {rank_names(senders)} sent came damaged to rank {receiver}, so it was not used; a "
        "network card or some memory may be at fault"
    )


def error_text(error: BaseException) -> ErrorText:
    """Return an error as text for other ranks. It never raises, whatever the error's class does."""
    try:
        text = str(error)
    except Exception as e:  # noqa: BLE001 - the other ranks must get the error in any case
        text = f"its text cannot be told ({type(e).__name__})"
    # A lone surrogate cannot be encoded.
    text = text.encode("utf-8", "backslashreplace").decode()
    reason = error.reason if isinstance(error, UnavailableError) else "other"
    return ErrorText(type(error).__name__, text, reason)


def error_of_ranks(operation: str, texts: dict[int, ErrorText]) -> CasnapError:
    """Return the error to raise on this rank for errors of other ranks.

    The returned error tells the error of the lowest rank that failed, and has its type and reason
    if the type is one of casnap; else it is a RankError.

    Args:
        operation: The operation in words, for the message.
        texts: The error of each rank that failed, by rank.
    """
    rank = min(texts)
    text = texts[rank]
    kind = getattr(errors, text.kind, None)
    if kind is RankError:
        return RankError(text.text, tuple(texts))
    if isinstance(kind, type) and issubclass(kind, CasnapError):
        error = kind(f"rank {rank}: {text.text}")
        if isinstance(error, UnavailableError):
            error.reason = text.reason
        return error
    also = [r for r in texts if r != rank]
    others = f" (and {rank_names(also)})" if also else ""
    return RankError(
        f"{operation}: rank {rank} failed{others}: {text.kind}: {text.text}", tuple(texts)
    )
