"""Failures of an operation of several ranks: which ranks are at fault, and their errors as text."""

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
    """An error in the form in which one rank sends it to others.

    Attributes:
        kind: The name of the error's type.
        text: The error's message.
        reason: The ``reason`` of an UnavailableError; "other" for other errors.
    """

    kind: str
    text: str
    reason: Reason = "other"


class Failure(msgspec.Struct, array_like=True):
    """The reason why an operation of several ranks ended early.

    Attributes:
        ranks: The ranks at fault; empty if they are not known.
        reason: What happened to these ranks, in words; "" if ``error`` says it.
        error: The error that the rank at fault raised, if it raised one.
    """

    ranks: tuple[int, ...]
    reason: str
    error: ErrorText | None = None


class LinkFailedError(Exception):
    """The ranks cannot be connected, or the key-value store of the process group does not answer.

    Attributes:
        failure: The ranks at fault, and what happened to them.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def damage_text(senders: Sequence[int], receiver: int) -> str:
    """Return the error message for parts that were damaged on their way to this rank.

    Args:
        senders: The ranks that sent the parts.
        receiver: This rank.
    """
    return (
        f"what {rank_names(senders)} sent came damaged to rank {receiver}, so it was not used; a "
        "network card or some memory may be at fault"
    )


def error_text(error: BaseException) -> ErrorText:
    """Return an error in the form for other ranks. This works even if ``str(error)`` raises."""
    try:
        text = str(error)
    except Exception as e:  # noqa: BLE001 - the other ranks must get the error in any case
        text = f"its text cannot be told ({type(e).__name__})"
    # A lone surrogate cannot be encoded.
    text = text.encode("utf-8", "backslashreplace").decode()
    reason = error.reason if isinstance(error, UnavailableError) else "other"
    return ErrorText(type(error).__name__, text, reason)


def error_of_ranks(operation: str, texts: dict[int, ErrorText]) -> CasnapError:
    """Return the error to raise on this rank because other ranks failed.

    It carries the message of the failed rank with the lowest number. If casnap defines the type of
    that rank's error, the returned error has this type, and also the ``reason``. Otherwise it is a
    RankError.

    Args:
        operation: The operation in words, for the message.
        texts: The number of each failed rank → its error.
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
