"""Reloading the weights of inference engines from a folder that a pull has made.

Each function returns a callback for :meth:`casnap.Store.follow`. It calls what the engine documents
for that, with the folder of the very version, and raises if the engine does not say that it has
loaded it: then the follower calls again. ``docs/compatibility.md`` says what was tried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from casnap.errors import CasnapError

OnVersion = Callable[[Path, list[str]], None]
_MOST_ANSWER = 1 << 16


def reload_sglang(
    url: str,
    *,
    abort_all_requests: bool = False,
    headers: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> OnVersion:
    """Return a callback that has a server of SGLang load each version.

    It posts to ``/update_weights_from_disk``. The server flushes its cache of prefixes, and gets
    the name of the version's folder as its ``weight_version``. The server must see the folder under
    the same path.

    Args:
        url: Of the server, such as ``http://localhost:30000``.
        abort_all_requests: Whether it aborts the requests that are under way. Otherwise it waits
            for them.
        headers: Further headers, such as ``{"Authorization": "Bearer ..."}``.
        timeout: Seconds to wait for the answer.

    Raises:
        ValueError: The URL is none of HTTP.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"url is like http://localhost:30000; got {url!r:.200}")
    place = f"{url.rstrip('/')}/update_weights_from_disk"

    def reload(folder: Path, changed: list[str]) -> None:
        asked = {
            "model_path": str(folder),
            "abort_all_requests": abort_all_requests,
            "weight_version": folder.name,
        }
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        request = Request(place, json.dumps(asked).encode(), all_headers)
        try:
            with urlopen(request, timeout=timeout) as response:
                answer = response.read(_MOST_ANSWER)
        except HTTPError as e:
            answer = e.read(_MOST_ANSWER)
        except (URLError, TimeoutError) as e:
            raise CasnapError(f"{place} cannot be reached: {e}") from e
        try:
            success = json.loads(answer)["success"] is True
        except (ValueError, TypeError, KeyError):
            success = False
        if not success:
            text = answer.decode("utf-8", "replace")
            raise CasnapError(f"{place} did not load {folder}: {text:.500}")

    return reload


def reload_vllm(llm: Any, *, timeout: float | None = None) -> OnVersion:
    """Return a callback that has a ``vllm.LLM`` of this process load each version.

    It calls ``reload_weights`` on each worker with the folder as ``weights_path``, then forgets the
    prefixes that the old weights have computed. Let no request run meanwhile: vLLM loads layer
    by layer.

    Args:
        llm: The engine.
        timeout: Seconds to wait for the workers; None for as long as it takes.
    """

    def reload(folder: Path, changed: list[str]) -> None:
        llm.collective_rpc("reload_weights", timeout, kwargs={"weights_path": str(folder)})
        if llm.reset_prefix_cache() is False:
            raise CasnapError(
                f"vLLM has loaded {folder}, but kept its cache of prefixes, since requests run; "
                "it is reset when the callback is called again"
            )

    return reload
