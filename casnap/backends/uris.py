"""URIs of remote places: how casnap splits them, and which ones it refuses before any request.

``s3://bucket/run1/step_100`` is the snapshot ``step_100`` of the store ``s3://bucket/run1``. No
store is looked for further up. A double slash marks the end of a shorter store URI:
``s3://bucket/ckpts//run1/step_1`` is the snapshot ``run1/step_1`` of the store
``s3://bucket/ckpts``.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from casnap.errors import InvalidNameError, NotAStoreError
from casnap.format.names import STORE_FOLDER, check_name
from casnap.runtime.environment import given_path, is_file_uri, local_path

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# A URI that went through a Path, which drops a slash.
_ONE_SLASH = re.compile(r"(?i:s3|s3a|gs|gcs):/(?!/)")


class Uri(NamedTuple):
    """A remote URI, split into a store and a name.

    Attributes:
        store: The URI of the store, without a slash at its end.
        name: The name or prefix after a double slash; "" if the URI has no double slash.
        parent: The store's URI without its last part, and this last part. The first is "" if the
            store is a whole bucket.
    """

    store: str
    name: str
    parent: tuple[str, str]

    @property
    def is_bucket(self) -> bool:
        """Whether the store is a whole bucket."""
        return not self.parent[0]

    def as_snapshot(self) -> Uri:
        """Read the URI as the URI of a snapshot: the last part of the store becomes the name.

        A URI with a double slash has a name already, and is returned as it is.

        Raises:
            InvalidNameError: The URI has no part that could be the name.
        """
        if self.name:
            return self
        store, name = self.parent
        if not store:
            raise InvalidNameError(
                f"{self.store} names a bucket, not a snapshot in it; add a name, like "
                f"{self.store}/run1/step_100"
            )
        return _uri(store, check_name(name))


def store_uri(uri: str | os.PathLike[str]) -> Uri | None:
    """Split a URI into a store and a prefix in the store.

    Returns:
        Both; None if the text is a local path or a ``file:`` URI.

    Raises:
        InvalidNameError: The prefix is not a valid name.
        NotAStoreError: No store may be at this URI.
    """
    text = given_path(uri)
    if _ONE_SLASH.match(text):
        scheme = text.partition(":")[0].lower()
        raise NotAStoreError(
            f"a URI begins with {scheme}:// and is a str (a Path drops one of the slashes); if a "
            f"local folder is meant, write ./{scheme}:"
        )
    match = _URI.fullmatch(text)
    if match is None and "://" in text:
        raise NotAStoreError(
            f"{text.partition('://')[0]!r} is not a URI scheme; write s3://bucket/run1, or for a "
            "local folder a path without '://'"
        )
    if match is None or match[1].lower() == "file":
        return None
    scheme, path = match[1].lower(), match[2]
    place, _, name = path.rstrip("/").partition("//")
    _check(scheme, place)
    return _uri(f"{scheme}://{place}", check_name(name) if name else "")


def joined(store: str, name: str, *, is_view: bool = False) -> str:
    """Return the path or URI of a snapshot, or of a view: a store limited to names below a prefix.

    :func:`store_uri` splits it again.

    Args:
        store: The path or URI of the store, or of a view of the store.
        name: The name of the snapshot, or the prefix of the view; "" for the store itself.
        is_view: Whether ``name`` is the prefix of a view.
    """
    if not name:
        return store
    _, is_far, place = store.partition("://")
    ends = bool(is_far) and "//" not in place and (is_view or "/" in name)
    return f"{store}{'//' if ends else '/'}{name}"


def name_below(name: str, *places: str) -> str:
    """Return a name in a store. A path or URI of a snapshot is reduced to the part below the store.

    Args:
        name: A name, or a path or URI.
        places: The path or URI of the store, or of a view of the store, in two forms: as the user
            gave it, and with all links resolved.

    Raises:
        InvalidNameError: The path or URI does not lie in the store.
    """
    is_path = bool(name.strip("/")) and (
        name.startswith(("/", "~/")) or "://" in name or is_file_uri(name)
    )
    path = local_path(name) if is_path else name
    for place in map(local_path, places):
        base = place.rstrip("/")
        if path == base:
            return ""
        if path.startswith(f"{base}/"):
            return path[len(base) :].strip("/")
    if is_path and not _URI.fullmatch(path):
        # The store knows its real path, so compare the real path of the name too.
        folder = os.path.realpath(os.path.dirname(path.rstrip("/")))  # noqa: PTH120
        real = f"{folder}/{os.path.basename(path.rstrip('/'))}"  # noqa: PTH119
        for place in places:
            if real.startswith(f"{place.rstrip('/')}/"):
                return real[len(place.rstrip("/")) :].strip("/")
    if is_path:
        raise InvalidNameError(
            f"{name!r:.500} is a path, and not one in {places[-1]}; a name in it is like "
            "'run1/step_100'"
        )
    return name


def _uri(store: str, name: str) -> Uri:
    scheme, _, place = store.partition("://")
    parent, _, base_name = place.rpartition("/")
    return Uri(store, name, (f"{scheme}://{parent}" if parent else "", base_name))


def _check(scheme: str, place: str) -> None:
    """Check that casnap may have a store at a place.

    Args:
        scheme: The scheme of the URI.
        place: The rest of the URI, after ``://``.

    Raises:
        NotAStoreError: Casnap refuses the place.
    """
    bucket, *folders = place.split("/")
    uri = f"{scheme}://{place}"
    is_arn = bucket.startswith("arn:")
    if ":" in bucket and not is_arn and (scheme in ("s3", "s3a", "gs", "gcs") or "@" in place):
        # The message does not show the credentials, since messages go to logs.
        raise NotAStoreError(
            f"a URI of {scheme} with credentials in it is refused, since URIs are shown and "
            "logged; give them by storage_options=, or by the environment or configuration of the "
            "client"
        )
    if re.search(r"\?.*(signature|credential|token|sig)=", place, re.IGNORECASE):
        raise NotAStoreError(
            f"a URI of {scheme} with a signature in its query is refused, since URIs are shown and "
            "logged, and a signature opens one object alone; name the bucket, and give credentials"
        )
    if scheme in ("http", "https"):
        raise NotAStoreError(
            f"a store cannot be at {scheme}://; name the bucket (s3://bucket/run1), and give "
            "the server as storage_options={'endpoint_url': ...}, or --endpoint-url"
        )
    if not bucket:
        raise NotAStoreError(f"{uri} names no bucket; write {scheme}://bucket/run1")
    if is_arn:
        if ".mrap" in place:
            raise NotAStoreError(
                f"{uri} is a multi-region access point, where a root that one region has may be "
                "missing in another, so writers cannot be kept apart; name the bucket of one region"
            )
        raise NotAStoreError(f"{uri} is an ARN; name the bucket, or the access point's alias")
    if STORE_FOLDER in folders:
        raise NotAStoreError(
            f"{uri} lies in {STORE_FOLDER}, where a store keeps its objects; name what is above it"
        )
    if any(part in (".", "..") for part in folders) or not uri.isprintable():
        raise NotAStoreError(
            f"{uri!r} has a '.' or '..' component, or characters that do not print; "
            "choose another place"
        )


def without_secrets(message: str) -> str:
    """Return a message in which the URLs have no secrets: no user, password, query or token."""
    message = re.sub(r"\?[^\s'\"`=]+=[^\s'\"`]*", "?…", message)
    message = re.sub(r"//[^/@\s]*@|[^/@\s'\"]+:[^/@\s]*@", _slashes_only, message)
    return re.sub(r"(\w*token=)[^&\s'\"]*", r"\1…", message)


def _slashes_only(match: re.Match[str]) -> str:
    return "//" if "//" in match[0] else ""
