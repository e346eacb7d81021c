"""Sending an error of one rank to the others, which raise it."""

from __future__ import annotations

from casnap import errors
from casnap.errors import CasnapError, RankError
from casnap.format.names import rank_names

ErrorText = tuple[str, str]
"""The type of an error, and its message."""


def error_text(error: BaseException) -> ErrorText:
    """Return an error as text for other ranks, whatever its class does."""
    try:
        text = str(error)
    except Exception as e:  # noqa: BLE001 - whatever it is, the others must hear of the error
        text = f"its text cannot be told ({type(e).__name__})"
    # A lone surrogate cannot be encoded.
    return type(error).__name__, text.encode("utf-8", "backslashreplace").decode()


def error_of_ranks(operation: str, texts: dict[int, ErrorText]) -> CasnapError:
    """Return the error to raise here for errors of other ranks.

    It is of the same type if that is one of casnap's, else a RankError.

    Args:
        operation: What the ranks do, for the message.
        texts: The error of each rank that failed.
    """
    rank, (name, text) = min(texts.items())
    kind = getattr(errors, name, None)
    if kind is RankError:
        return RankError(text, tuple(texts))
    if isinstance(kind, type) and issubclass(kind, CasnapError):
        return kind(f"rank {rank}: {text}")
    also = [r for r in texts if r != rank]
    others = f" (and {rank_names(also)})" if also else ""
    return RankError(f"{operation}: rank {rank} failed{others}: {name}: {text}", tuple(texts))
