"""Decide whether gcsfs should look for the credentials that Google's cloud gives its machines.

gcsfs asks a metadata server for them. Outside Google's cloud there is no such server, and gcsfs
keeps asking for more than 20 seconds.
"""

from __future__ import annotations

import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from gcsfs.credentials import GoogleCredentials
from google.auth import _cloud_sdk

from casnap.errors import UnavailableError
from casnap.runtime.environment import google_metadata_server

# How long to wait for the metadata server, in seconds: as long as one attempt of Google's library.
_PATIENCE = 3.0
_BETWEEN = 0.25
_FLAVOR = {"Metadata-Flavor": "Google"}


def token_to_use(token: Any) -> Any:
    """Return the ``token=`` to pass to gcsfs, so that gcsfs does not wait in vain.

    Given None, gcsfs looks for default credentials, then asks the metadata server, then goes on
    without credentials. If this function finds neither default credentials nor a metadata server,
    it returns a token with which gcsfs asks no metadata server.

    Args:
        token: The user's ``token=``. If it is not None, it is returned.
    """
    if token is not None or _has_defaults():
        return token
    server = google_metadata_server()
    if server is None or _answers(*server):
        return token
    return "cache" if getattr(GoogleCredentials, "tokens", None) else "anon"


def none_found_error(uri: str, refusal: Exception) -> UnavailableError:
    """Return the error to raise when the server refuses a request that had no credentials.

    Args:
        uri: The URI of the place, for the message.
        refusal: The server's answer.
    """
    return UnavailableError(
        f"{uri}: no credentials were found, and the server asks for some ({refusal}). Run `gcloud "
        "auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS, or pass token= in "
        "storage_options",
        reason="credentials",
    )


def _has_defaults() -> bool:
    # This function is not public, but it knows the folder on each system.
    return Path(_cloud_sdk.get_application_default_credentials_path()).exists()


def _answers(host: str, port: int) -> bool:
    """Whether a metadata server answers at an address.

    The question is repeated for some seconds, since a server that is just starting may refuse at
    first.
    """
    until = time.monotonic() + _PATIENCE
    while (seconds := until - time.monotonic()) > 0:
        connection = HTTPConnection(host, port, timeout=seconds)
        try:
            connection.request("GET", "/", headers=_FLAVOR)
            answer = connection.getresponse()
        except (OSError, HTTPException):
            time.sleep(min(_BETWEEN, seconds))
        else:
            # A proxy may answer where there is no metadata server.
            return all(answer.getheader(name) == value for name, value in _FLAVOR.items())
        finally:
            connection.close()
    return False
