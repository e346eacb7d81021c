"""Why an operation of several ranks ended early, and which ranks are at fault."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from casnap.format.names import rank_names
from casnap.ranks.remote_errors import ErrorText

STORE_SILENT = (
    "the store of the process group does not answer: the process that keeps it, rank 0 if no "
    "launcher does, died or hangs"
)


class Failure(msgspec.Struct, array_like=True):
    """Why an operation ended early.

    Attributes:
        ranks: The ranks at fault, as far as that is known.
        reason: What happened to them.
        error: The error of that rank, if it raised one.
    """

    ranks: tuple[int, ...]
    reason: str
    error: ErrorText | None = None


class LinkFailedError(Exception):
    """The ranks cannot be connected, or the store does not answer.

    Attributes:
        failure: Which ranks are at fault, and why.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def not_come(missing: Sequence[int], gone: Sequence[int], timeout: float) -> Failure:
    """Return the failure of ranks that did not come to a group, of which some have died."""
    what = "died" if set(missing) <= set(gone) else f"did not come within {timeout:g} s"
    return Failure(tuple(missing), f"{rank_names(missing)} {what}")


def parsed_ranks(text: str) -> list[int]:
    """Return ranks that were noted as a text."""
    return [int(rank) for rank in text.split()]
