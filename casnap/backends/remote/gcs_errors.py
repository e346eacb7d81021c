"""The meaning of error responses of Google Cloud Storage, by their HTTP status and text."""

from __future__ import annotations

import json

from casnap.backends.remote.client import BehindItsEndError, TakenError, TransientError
from casnap.errors import BackendError, UnavailableError

_MAY_PASS = (408, 409, 500, 502, 504)
_BUSY = (429, 503)


class StatusError(Exception):
    """The server has answered a request with an error.

    Attributes:
        status: The HTTP status.
        text: The body of the response.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {_message(text)}")
        self.status = status
        self.text = text


def casnap_error(refusal: StatusError, subject: str, uri: str) -> Exception | None:
    """Return casnap's error for an error response of the server.

    Args:
        refusal: The response.
        subject: The object, for messages.
        uri: The URI of the store, for messages.

    Returns:
        The error; None for a 404 that does not say whether the object or the bucket is missing.
    """
    status, text = refusal.status, refusal.text
    if status == 404:
        if "bucket does not exist" in text:
            return UnavailableError(
                f"{uri}: the bucket does not exist ({refusal})", reason="no_bucket"
            )
        return FileNotFoundError(subject) if "No such object" in text else None
    if status == 416:
        return BehindItsEndError(subject)
    if status == 412:
        return TakenError(str(refusal))
    limited = status == 403 and "ateLimitExceeded" in text
    if status in _BUSY or limited:
        return TransientError(str(refusal), busy=True)
    if status in _MAY_PASS or (status == 400 and "CRC32C" in text):
        return TransientError(str(refusal))
    if status == 401:
        return UnavailableError(
            f"{uri}: the credentials are wrong or have expired ({refusal})", reason="credentials"
        )
    if "requester pays" in text or "UserProjectMissing" in text:
        return UnavailableError(
            f"{uri}: the requester pays for this bucket: pass storage_options="
            f"{{'requester_pays': True, 'project': …}} ({refusal})",
            reason="denied",
        )
    if status == 403:
        return UnavailableError(
            f"{subject}: the server does not allow this ({refusal}); the user needs the role "
            "Storage Object User there",
            reason="denied",
        )
    return BackendError(f"{subject}: {refusal}")


def _message(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text[:200]
