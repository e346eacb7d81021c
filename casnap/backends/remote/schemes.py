"""Choose the remote backend for a URI, and check that the packages it needs are installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from typing import Any

from casnap.backends.remote.backend import RemoteBackend
from casnap.backends.remote.client import Client, valid_options
from casnap.backends.remote.retries import Retries
from casnap.errors import BackendError, NotAStoreError, StoreError, nearest, pip_install

# Scheme → the library, and the extra of casnap that installs it.
_EXTRAS = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}
_SAME = {"s3a": "s3", "gcs": "gs"}


def remote_backend(uri: str, storage_options: Mapping[str, Any]) -> RemoteBackend:
    """Return the backend for a URI with a scheme. It does not connect yet.

    Raises:
        NotAStoreError: The URI has no bucket, or no backend knows its scheme.
        BackendError: A package that the scheme needs is not installed.
        StoreError: The options are wrong.
    """
    scheme, _, path = uri.partition("://")
    scheme = _SAME.get(scheme, scheme)
    if not path.strip("/"):
        raise NotAStoreError(f"{uri} names no bucket")
    uri = f"{scheme}://{path.rstrip('/')}"
    with valid_options(uri):
        options = dict(storage_options)
        retries = _retries(uri, dict(options.pop("casnap", {})))
    _check_scheme(uri, scheme)
    return RemoteBackend(uri, partial(_client, uri, options, retries), retries)


def _retries(uri: str, settings: Mapping[str, Any]) -> Retries:
    names = [field.name for field in fields(Retries)]
    for name, value in settings.items():
        if not isinstance(value, int | float):
            raise TypeError(f"casnap's {name} is a number, not {type(value).__name__}")
        if name not in names:
            raise StoreError(
                f"{uri}: storage_options['casnap'] has no setting {name!r}{nearest(name, names)}"
            )
    return Retries(**settings)


def _check_scheme(uri: str, scheme: str) -> None:
    if scheme in _EXTRAS:
        library, extra = _EXTRAS[scheme]
        if find_spec(library) is None:
            raise BackendError(
                f"{uri}: {scheme}:// needs {library}, which is not installed; "
                f"run: {pip_install(extra)}"
            )
        return
    schemes = {*_EXTRAS, *_others()}
    if scheme not in schemes:
        more = "" if len(schemes) > len(_EXTRAS) else "; fsspec, which knows more, is not installed"
        raise NotAStoreError(f"{uri}: no backend knows {scheme}://{nearest(scheme, schemes)}{more}")


def _others() -> set[str]:
    if find_spec("fsspec") is None:
        return set()
    from fsspec.registry import known_implementations, registry

    return {*known_implementations, *registry}


def _client(uri: str, options: Mapping[str, Any], retries: Retries) -> Client:
    """Make the client for a URI. This imports the library of the scheme, which is slow."""
    scheme = uri.partition("://")[0]
    if scheme == "s3":
        from casnap.backends.remote.s3 import S3Client

        return S3Client(uri, options, retries)
    if scheme == "gs":
        from casnap.backends.remote.gcs import GcsClient

        return GcsClient(uri, options, retries)
    from fsspec.registry import known_implementations

    from casnap.backends.remote.any_fsspec import FsspecClient

    try:
        return FsspecClient(uri, options)
    except ImportError as e:
        needs = known_implementations.get(scheme, {}).get("err") or e
        raise BackendError(
            f"{uri}: fsspec, by which casnap reaches {scheme}://, lacks a package: {needs}. "
            "Install it; s3:// and gs:// are what casnap supports by itself"
        ) from e
