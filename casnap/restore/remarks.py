"""What the log says about a snapshot that is loaded: unhealthy tensors, another environment."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from casnap.errors import shell_word
from casnap.format.entries import Entry
from casnap.runtime.environment import is_other_rank
from casnap.runtime.sizes import amount
from casnap.state.roles import Role, role_of
from casnap.state.run_environment import changes_since
from casnap.storage import Contents

_log = logging.getLogger("casnap")

# Moments; and learning rates, which the groups of parameters have.
_OF_OPTIMIZERS: frozenset[Role] = frozenset({"moments", "scheduler"})
# The commits of the snapshots that a warning has named.
_warned: set[bytes] = set()


def warn_of_health(contents: Contents) -> None:
    """Warn, once for each snapshot and on rank 0, that it has NaN.

    Args:
        contents: The snapshot, which is loaded.
    """
    commit, count = contents.row.commit, contents.row.unhealthy
    if count and commit not in _warned and not is_other_rank():
        _warned.add(commit)
        _log.warning(
            "%s has NaN or infinite elements in %s: `casnap show %s --health` names them. "
            "Store.latest(healthy=True) finds the last snapshot without",
            contents.label,
            amount(count, "tensor"),
            shell_word(contents.label),
        )


def log_remarks(
    contents: Contents, entries: Iterable[tuple[str, Entry]], rank: int, ranks: int
) -> list[str]:
    """Log how the environment differs from that of the take, and warn of NaN.

    Rank 0 logs the differences in one line. It is a warning if a difference may change the numbers
    that a resumed training computes. A state without an optimizer's values is not taken for a
    training.

    Args:
        contents: The snapshot, which is loaded.
        entries: Its entries that are loaded, and their paths.
        rank: The rank of this process among those that load.
        ranks: How many ranks load.

    Returns:
        The differences in words, such as ``"torch 2.13.0 → 2.14.1"`` and ``"8 → 6 ranks"``.
    """
    before = contents.row.world_size
    changes = changes_since(contents.environment, before, ranks, with_commit=rank == 0)
    texts = [change.text for change in changes]
    if texts and rank == 0:
        text = f"{contents.label}: since the take: {', '.join(texts)}"
        is_numeric = any(change.is_numeric for change in changes)
        if is_numeric and any(role_of(path, entry) in _OF_OPTIMIZERS for path, entry in entries):
            _log.warning("%s. So the training may compute other numbers than before", text)
        else:
            _log.info("%s", text)
    warn_of_health(contents)
    return texts
