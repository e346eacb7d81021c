"""A notice: a file of casnap where another library looks for a file of its own.

Who unpickles it gets an error that begins with casnap: it has torch look up a layout by the text of
the notice. torch's safe unpickler may call that function too, so the error is not one of the
unpickler, which torch would put advice before. So a notice never passes for what it stands for.
"""

from __future__ import annotations

HEAD_BYTES = 64
"""How many of a file's first bytes tell whether it is a notice."""
_HEADS = (
    b"\x80\x02X\x06\x00\x00\x00casnap",
    b"\x80\x02ccasnap.integrations.notices\n",  # before 1.0
)
_CALL = _HEADS[0] + b"ctorch.serialization\n_get_layout\nX%b%b\x85R."
"""A pickle of protocol 2 that calls a function with one text; that raises ``KeyError(text)``."""


def notice(subject: str) -> bytes:
    """Return the content of a file whose unpickling fails, with an error that names casnap.

    Args:
        subject: The message: what the snapshot has, and how to read it.
    """
    text = f"casnap: {subject}".encode()
    return _CALL % (len(text).to_bytes(4, "little"), text)


def is_notice(head: bytes) -> bool:
    """Whether a file is a notice, by its first :data:`HEAD_BYTES` bytes."""
    return head.startswith(_HEADS)
