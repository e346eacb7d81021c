"""The meaning of errors of S3, by HTTP status and code.

The type of a library's exception does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import aiohttp
import botocore.exceptions as boto
from botocore.parsers import ResponseParserError

from casnap.backends.local_files.system_errors import EXHAUSTED
from casnap.backends.remote.client import (
    BehindItsEndError,
    TakenError,
    TransientError,
    tls_problem,
)
from casnap.backends.uris import without_secrets
from casnap.errors import BackendError, PlaceError, UnavailableError

_BUSY = frozenset(
    {
        "SlowDown",
        "Throttling",
        "RequestLimitExceeded",
        "TooManyRequests",
        "ServiceUnavailable",
    }
)
# Sent again, these may succeed: the body was hurt on its way, or the server had a bad moment.
_MAY_PASS = frozenset(
    {
        "InternalError",
        "RequestTimeout",
        "RequestTimeoutException",
        "OperationAborted",
        "IncompleteBody",
        "BadDigest",
        "XAmzContentSHA256Mismatch",
        "XAmzContentChecksumMismatch",
        "ConditionalRequestConflict",
    }
)
_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
)
_CREDENTIALS = frozenset(
    {
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "InvalidToken",
        "InvalidSecurity",
        "CredentialsNotSupported",
        "InvalidClientTokenId",
        "UnrecognizedClientException",
        "AuthorizationQueryParametersError",
    }
)
_ELSEWHERE = frozenset(
    {
        "PermanentRedirect",
        "TemporaryRedirect",
        "Redirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
    }
)
_CONNECTING = (
    boto.EndpointConnectionError,
    boto.ConnectTimeoutError,
    boto.ProxyConnectionError,
)
_BROKEN = (
    OSError,
    asyncio.TimeoutError,
    boto.HTTPClientError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    aiohttp.ClientError,
)
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.ProfileNotFound,
)


# The rights that a user needs for each request.
_RIGHTS = {
    "get_object": "s3:GetObject there (and s3:ListBucket, without which a missing object looks so)",
    "list_objects_v2": "s3:ListBucket on the bucket",
    "put_object": "s3:PutObject there",
    "copy_object": "s3:GetObject and s3:PutObject there",
    "delete_object": "s3:DeleteObject there",
    "delete_objects": "s3:DeleteObject there",
    "get_bucket_lifecycle_configuration": "s3:GetLifecycleConfiguration on the bucket",
    "get_bucket_versioning": "s3:GetBucketVersioning on the bucket",
    "get_object_lock_configuration": "s3:GetBucketObjectLockConfiguration on the bucket",
}
# Statuses of servers of another kind, which name no error of S3.
_NOT_S3 = frozenset({400, 404, 405, 501})


class _Request(NamedTuple):
    subject: str
    uri: str
    method: str


def casnap_error(error: Exception, subject: str, uri: str, method: str) -> Exception:
    """Return casnap's error for an error that the S3 library raised.

    Args:
        error: The error of the library.
        subject: The object, for messages.
        uri: The URI of the store, for messages.
        method: The name of the request in botocore, such as ``get_object``.
    """
    answer = _answer(error)
    if answer is not None:
        return _answered(answer, _Request(subject, uri, method))
    detail = f"{type(error).__name__}: {without_secrets(str(error))}"
    if any(isinstance(e, OSError) and e.errno in EXHAUSTED for e in _chain(error)):
        return UnavailableError(
            f"{subject}: {detail}; this process or host has too many files open (`ulimit -n`), or "
            "no memory left",
            reason="exhausted",
        )
    if isinstance(error, _NO_CREDENTIALS):
        return UnavailableError(
            f"{uri}: {detail}. Pass key, secret and token in storage_options, or anon=True for "
            "none, or set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            reason="credentials",
        )
    if "CERTIFICATE_VERIFY_FAILED" in detail:
        return UnavailableError(
            f"{subject}: the server's certificate is not trusted: {detail}", reason="unreachable"
        )
    if (no_tls := tls_problem(_chain(error))) is not None:
        return no_tls
    if isinstance(error, _CONNECTING):
        return TransientError(detail, reached=False)
    if isinstance(error, ResponseParserError):
        # The answer was cut off, or is not S3's: the server does not count as reached.
        return TransientError(detail, reached=False)
    if isinstance(error, _BROKEN):
        return TransientError(detail)
    return BackendError(f"{subject}: {detail}")


def delete_error(error: dict[str, Any], subject: str) -> TransientError | PlaceError:
    """Return casnap's error for one object that a request to delete many could not delete.

    Args:
        error: The part of the server's response about this object.
        subject: The object, for messages.
    """
    code, message = str(error.get("Code")), str(error.get("Message"))
    if code in _BUSY | _MAY_PASS:
        return TransientError(f"{code}: {message}", busy=code in _BUSY)
    if code == "AccessDenied":
        return _denied(code, message, subject, "delete_objects")
    return BackendError(f"{subject} cannot be deleted: {code}: {message}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        inner = getattr(error, "kwargs", None)  # has the error that botocore wraps
        of_botocore = inner.get("error") if isinstance(inner, dict) else None
        error = of_botocore or getattr(error, "os_error", None) or error.__cause__


def _answer(error: Exception) -> dict[str, Any] | None:
    for e in (error, error.__cause__):
        if isinstance(e, boto.ClientError):
            return dict(e.response)
    return None


def _answered(answer: dict[str, Any], request: _Request) -> Exception:
    subject, uri, _ = request
    meta, error = answer.get("ResponseMetadata", {}), answer.get("Error", {})
    status, code = int(meta.get("HTTPStatusCode", 0)), str(error.get("Code", ""))
    message = without_secrets(str(error.get("Message", "")))
    detail = f"{status} {code}: {message}"
    if code == "NoSuchKey":
        return FileNotFoundError(subject)
    if code == "NoSuchBucket":
        return UnavailableError(f"{uri}: the bucket does not exist ({detail})", reason="no_bucket")
    if code == "InvalidRange" or status == 416:
        return BehindItsEndError(subject)
    if status == 412:
        return TakenError(detail)
    if code in _BUSY or status in (429, 503):
        return TransientError(detail, busy=True)
    if code in _MAY_PASS or status in (408, 409, 500, 502, 504):
        # botocore turns a page of HTML into a 500. It may come from a server of another kind.
        return TransientError(detail, reached=status != 500 or code not in _no_code(status))
    if code == "InvalidObjectState":
        return UnavailableError(
            f"{subject} is archived ({error.get('StorageClass', 'its storage class')}); restore it "
            "in the bucket first, and exclude stores from lifecycle rules that archive",
            reason="archived",
        )
    region = error.get("Region") or meta.get("HTTPHeaders", {}).get("x-amz-bucket-region")
    if code in _ELSEWHERE or status in (301, 307):
        region_name = f"{region!r}" if region else "the bucket's region"
        return UnavailableError(
            f"{uri}: the bucket is in another region; pass storage_options="
            f"{{'client_kwargs': {{'region_name': {region_name}}}}} or set AWS_REGION ({detail})",
            reason="unreachable",
        )
    return _refused(status, code, detail, request)


def _refused(status: int, code: str, detail: str, request: _Request) -> PlaceError:
    subject, uri, method = request
    if status in _NOT_S3 and code in _no_code(status):
        return BackendError(
            f"{uri}: the host there seems to be no S3 server ({detail}); check endpoint_url in "
            "storage_options, AWS_ENDPOINT_URL, or --endpoint-url"
        )
    refused = _credentials_error(status, code, detail, uri)
    if refused is not None:
        return refused
    if status == 403 or code.startswith("KMS.") or code == "AccessDenied":
        return _denied(code, detail, subject, method)
    return BackendError(f"{subject}: {detail}")


def _no_code(status: int) -> tuple[str, str]:
    """Return the two error codes that botocore may invent for an answer that has none."""
    return "", str(status)


def _credentials_error(status: int, code: str, detail: str, uri: str) -> UnavailableError | None:
    if code in _EXPIRED:
        return UnavailableError(
            f"{uri}: the credentials have expired; get new ones ({detail})", reason="credentials"
        )
    if code == "RequestTimeTooSkewed":
        return UnavailableError(
            f"{uri}: the clock of this host and the server's differ; set the clock ({detail})",
            reason="credentials",
        )
    if code in _CREDENTIALS or status == 401:
        return UnavailableError(
            f"{uri}: the server does not know these credentials ({detail})", reason="credentials"
        )
    return None


def _denied(code: str, detail: str, subject: str, method: str) -> UnavailableError:
    advice = f"the user needs {_RIGHTS[method]}"
    if "KMS" in code or "kms" in detail:
        advice = "the user needs kms:Decrypt and kms:GenerateDataKey for the bucket's key"
    elif "requester" in detail.lower() or code == "InvalidPayer":
        advice = "the requester pays for this bucket: pass storage_options={'requester_pays': True}"
    return UnavailableError(
        f"{subject}: the server does not allow this ({detail}); {advice}", reason="denied"
    )
