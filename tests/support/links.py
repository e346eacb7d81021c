"""The connections between ranks that this process keeps."""

from __future__ import annotations

from casnap.ranks import joining
from casnap.ranks.link import Link


def links() -> list[Link]:
    """Return the connections that were made, one for each set of ranks."""
    return list(joining._links.values())


def forget_links() -> None:
    """Have the next operation connect its ranks anew."""
    joining._links.clear()
