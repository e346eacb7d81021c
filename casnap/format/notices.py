"""Notices: files of casnap that lie where another library expects a file of its own.

A program that unpickles a notice gets an error whose text begins with ``casnap``. So no program
takes a notice for the other library's file. The error comes from a function of torch that looks up
a layout: unpickling a notice calls this function with the text. torch's safe unpickler allows this
call too. If it refused the call, its error would begin with torch's own advice.
"""

from __future__ import annotations

HEAD_BYTES = 64
"""How many of a file's first bytes tell whether it is a notice."""
_HEADS = (
    b"\x80\x02X\x06\x00\x00\x00casnap",
    b"\x80\x02ccasnap.integrations.notices\n",  # before 1.0
)
_CALL = _HEADS[0] + b"ctorch.serialization\n_get_layout\nX%b%b\x85R."
"""A pickle of protocol 2. It calls a function with one text, which raises ``KeyError(text)``."""


def notice(subject: str) -> bytes:
    """Return the content of a notice. Unpickling it raises an error that names casnap.

    Args:
        subject: The message of the error: which data the snapshot has, and how to read the
            snapshot.
    """
    text = f"casnap: {subject}".encode()
    return _CALL % (len(text).to_bytes(4, "little"), text)


def is_notice(head: bytes) -> bool:
    """Whether a file is a notice.

    Args:
        head: The first :data:`HEAD_BYTES` bytes of the file.
    """
    return head.startswith(_HEADS)
