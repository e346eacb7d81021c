"""What the emulator of GCS leaves out: an upload with ifGenerationMatch=0 fails if there is one."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from urllib.parse import parse_qs, quote, urlsplit

from tests.support.faulty import Answer, Exchange, FaultyProxy, HttpFault, answer


def precondition_proxy(endpoint: str) -> FaultyProxy:
    """Return a proxy that honours ``ifGenerationMatch=0``: of several uploads at once, one wins."""
    lock = threading.Lock()

    def upload(exchange: Exchange) -> Answer:
        body = exchange.body()  # before the lock: a client may take its time
        with lock:
            if _is_there(endpoint, exchange.path, body):
                return answer(412, "conditionNotMet")(exchange)
            return exchange.go()

    conditional = "/upload/*ifGenerationMatch=0*"
    return FaultyProxy(endpoint, HttpFault(upload, "POST", conditional, times=None))


def _is_there(endpoint: str, path: str, body: bytes) -> bool:
    parts = urlsplit(path)
    found = parse_qs(parts.query).get("name")
    name = found[0] if found else _name_in(body)
    bucket = parts.path.split("/b/")[1].split("/")[0]
    url = f"{endpoint}/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
    try:
        with urllib.request.urlopen(url, timeout=60):
            return True
    except urllib.error.HTTPError as e:
        if e.code != 404:
            raise
        return False


def _name_in(body: bytes) -> str:
    """Return the name in the first part of a multipart upload, which is JSON."""
    start = body.index(b"{")
    described, _ = json.JSONDecoder().raw_decode(body[start : start + 10_000].decode("latin-1"))
    name: str = described["name"]
    return name
