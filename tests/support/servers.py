"""Object stores that tests start on this machine, on loopback, with all their data in a folder.

::

    with shared("seaweedfs", folder) as server:     # one server for all who name this folder
        with server.bucket() as bucket:
            ...                                     # bucket.uri, bucket.storage_options

A server is kept by a process of its own, the keeper. It listens at a socket in the folder, and each
user holds a connection to it. When the last user has hung up or died, the keeper kills the server
and deletes its folder. `python -m tests.support.servers seaweedfs` starts one for a person.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.ports import free_port

WRITER, READER, NOBODY = "casnap-writer", "casnap-reader", "casnap-nobody"
"""Users that SeaweedFS knows: one may do all, one only read and list, one nothing."""
SECRET = "not-a-secret-at-all"
_READY_SECONDS = 60.0
_STARTS = 3
# Objects that a server must take and give without a failure before it counts as ready.
_PUTS = 3
_PR_SET_PDEATHSIG = 1
_ROOT = Path(__file__).resolve().parents[2]


# --- what a test has --------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        kind: One of :data:`KINDS`.
        endpoint: The URL that clients are given.
        inner: The URL where buckets are made without credentials; of rclone the folder of its data.
    """

    kind: str
    endpoint: str
    inner: str

    @property
    def is_gcs(self) -> bool:
        return self.kind == "gcs"

    @property
    def scheme(self) -> str:
        return {"gcs": "gs", "azurite": "az"}.get(self.kind, "s3")

    @property
    def honours_if_absent(self) -> bool:
        """Whether two who put one key at once are told who was first."""
        return self.kind != "rclone"

    def storage_options(self, user: str = WRITER, secret: str = SECRET) -> dict[str, Any]:
        if self.is_gcs:
            return {"endpoint_url": self.endpoint, "token": "anon", "project": "casnap"}
        if self.kind == "azurite":
            return {"connection_string": azure_connection(self.endpoint)}
        return {"key": user, "secret": secret, "endpoint_url": self.endpoint}

    @contextmanager
    def bucket(self) -> Iterator[Bucket]:
        """Make a bucket, and delete it with all that is in it."""
        bucket = Bucket(self, f"casnap-{secrets.token_hex(6)}")
        KINDS[self.kind].make_bucket(self, bucket.name)
        try:
            yield bucket
        finally:
            KINDS[self.kind].delete_bucket(self, bucket.name)

    def client(self) -> Any:
        """Return a client of S3 that knows nothing of casnap."""
        import botocore.session

        return botocore.session.get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=WRITER,
            aws_secret_access_key=SECRET,
        )


@dataclass(frozen=True)
class Bucket:
    """A bucket of a server."""

    server: Server
    name: str

    @property
    def uri(self) -> str:
        return f"{self.server.scheme}://{self.name}"

    @property
    def storage_options(self) -> dict[str, Any]:
        return self.server.storage_options()

    @property
    def environment(self) -> dict[str, str]:
        """What the clients of S3 read from the environment."""
        options = self.storage_options
        return {
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
            "AWS_ENDPOINT_URL": options["endpoint_url"],
        }


@contextmanager
def shared(kind: str, folder: Path) -> Iterator[Server]:
    """Give the server that all processes share that name this folder; start it if it is not there.

    Args:
        kind: One of :data:`KINDS`.
        folder: Where the keeper's socket is.
    """
    with contextlib.ExitStack() as stack:
        at = folder / f"{kind}.sock"
        with Path(folder, f"{kind}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            line = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                line.connect(str(at))
            except OSError:
                _start_keeper(kind, at)
                line.connect(str(at))
            # The answer comes once the server is ready.
            answer = line.makefile().readline()
        found = json.loads(answer or '{"error": "its keeper died"}')
        if "error" in found:
            raise RuntimeError(f"{kind} does not start: {found['error']}")
        yield Server(**found)


def _start_keeper(kind: str, at: Path) -> None:
    at.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.support.servers", kind, "--socket", str(at)]
    keeper = subprocess.Popen(command, cwd=_ROOT, start_new_session=True)
    threading.Thread(target=keeper.wait, daemon=True).start()
    deadline = time.monotonic() + _READY_SECONDS
    while not at.exists():
        if keeper.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the keeper of {kind} does not start")
        time.sleep(0.01)


@contextmanager
def deaf_port(*, drops: bool) -> Iterator[str]:
    """Give the URL of a port that answers nothing.

    Args:
        drops: Whether it does not even take connections: its queue of them is full.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0 if drops else 100)
        for _ in range(3 if drops else 0):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


# --- the kinds --------------------------------------------------------------------------------


def _request(method: str, url: str, body: bytes | None = None) -> bytes:
    headers = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
        return content


def azure_connection(endpoint: str) -> str:
    """Return the connection string of the one account that Azurite knows; its key is published."""
    account = "devstoreaccount1"
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    return (
        f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};"
        f"BlobEndpoint={endpoint}/{account};"
    )


def _program(name: str) -> str:
    """Return the path of a program that `make` installed, or that is on the path."""
    places = ("bin", "servers/bin", "servers/node_modules/.bin")
    ours = (f"{sys.prefix}/{place}/{name}" for place in places)
    found = next(filter(os.path.exists, ours), None) or shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed; `make test-servers` installs it")
    return found


class Kind:
    """How a kind of server is started, and buckets are made there. This one is moto."""

    ports = 1
    environment: Mapping[str, str] = MappingProxyType({})

    def command(self, folder: Path, ports: list[int]) -> list[str]:
        return [_program("moto_server"), "-H", "127.0.0.1", "-p", str(ports[0])]

    def inner(self, folder: Path, ports: list[int]) -> str:
        """Return the ``inner`` of the server."""
        return f"http://127.0.0.1:{ports[0]}"

    @contextmanager
    def front(self, port: int) -> Iterator[str]:
        """Give the URL for clients: the server's, or that of what stands before it."""
        yield f"http://127.0.0.1:{port}"

    def make_bucket(self, server: Server, name: str) -> None:
        _request("PUT", f"{server.inner}/{name}")

    def delete_bucket(self, server: Server, name: str) -> None:
        """Delete a bucket, where that is cheap; the rest goes with the server."""

    def clean(self, ports: list[int]) -> None:
        """Delete what a killed server leaves outside its folder."""


class _SeaweedFS(Kind):
    ports = 4
    # One volume for each bucket, not seven.
    environment: Mapping[str, str] = MappingProxyType({"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"})

    def command(self, folder: Path, ports: list[int]) -> list[str]:
        s3, master, volume, filer = ports
        users = {WRITER: ["Admin"], READER: ["Read", "List"], NOBODY: []}
        identities = [
            {
                "name": name,
                "credentials": [{"accessKey": name, "secretKey": SECRET}],
                "actions": actions,
            }
            for name, actions in users.items()
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        options = {
            "dir": folder,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.port": s3,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.config": folder / "s3.json",
            "s3.autoCreateBucket": "false",
            "s3.localSocket": folder / "s3.sock",
            "master.port": master,
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 4096,
            "volume.port": volume,
            "volume.max": 10_000,
            "volume.preStopSeconds": 0,
            "filer.port": filer,
            "filer.localSocket": folder / "filer.sock",
        }
        given = [f"-{name}={value}" for name, value in options.items()]
        return [_program("weed"), "-logtostderr", "server", "-s3", *given]

    def inner(self, folder: Path, ports: list[int]) -> str:
        return f"http://127.0.0.1:{ports[3]}/buckets"

    def make_bucket(self, server: Server, name: str) -> None:
        _request("POST", f"{server.inner}/{name}/")

    def delete_bucket(self, server: Server, name: str) -> None:
        _request("DELETE", f"{server.inner}/{name}?recursive=true")

    def clean(self, ports: list[int]) -> None:
        for part, port in zip(("s3", "master", "volume", "filer"), ports, strict=True):
            Path(f"/tmp/seaweedfs-{part}-grpc-{port + 10_000}.sock").unlink(missing_ok=True)


class _Rclone(Kind):
    def command(self, folder: Path, ports: list[int]) -> list[str]:
        (folder / "data").mkdir()
        options = ["--auth-key", f"{WRITER},{SECRET}", "--addr", f"127.0.0.1:{ports[0]}"]
        config = ["--config", str(folder / "none"), "--cache-dir", str(folder / "cache")]
        # It lists what it remembers, as it does for five minutes by default. So buckets are made
        # through it, and it does not see that they are deleted.
        options += ["--dir-cache-time", "24h"]
        return [_program("rclone"), "serve", "s3", *options, *config, str(folder / "data")]

    def inner(self, folder: Path, ports: list[int]) -> str:
        return str(folder / "data")

    def make_bucket(self, server: Server, name: str) -> None:
        server.client().create_bucket(Bucket=name)

    def delete_bucket(self, server: Server, name: str) -> None:
        shutil.rmtree(Path(server.inner, name))


class _Gcs(Kind):
    def command(self, folder: Path, ports: list[int]) -> list[str]:
        # All in memory: on a disk it rewrites a file of all metadata at each put.
        options = ["--host", "127.0.0.1", "--port", str(ports[0]), "--in-memory", "--quiet"]
        return [_program("gcp-storage-emulator"), "start", *options]

    @contextmanager
    def front(self, port: int) -> Iterator[str]:
        """Put a proxy before it that refuses uploads of what is there, since it does not."""
        from tests.support.preconditions import precondition_proxy  # only this one needs torch

        with precondition_proxy(f"http://127.0.0.1:{port}") as proxy:
            yield proxy.url

    def make_bucket(self, server: Server, name: str) -> None:
        _request("POST", f"{server.inner}/storage/v1/b", json.dumps({"name": name}).encode())


class _Azurite(Kind):
    def command(self, folder: Path, ports: list[int]) -> list[str]:
        options = ["--blobHost", "127.0.0.1", "--blobPort", str(ports[0]), "--silent"]
        options += ["--inMemoryPersistence", "--skipApiVersionCheck"]
        return [_program("azurite-blob"), *options, "--disableTelemetry"]

    def make_bucket(self, server: Server, name: str) -> None:
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(azure_connection(server.inner)) as service:
            service.create_container(name)


class _Ceph(Kind):
    ports = 2

    def command(self, folder: Path, ports: list[int]) -> list[str]:
        script = str(_ROOT / "tests/support/ceph.py")
        return [sys.executable, script, str(folder), *map(str, ports), WRITER, SECRET]

    def make_bucket(self, server: Server, name: str) -> None:
        from botocore.exceptions import BotoCoreError

        try:
            server.client().create_bucket(Bucket=name)
        except BotoCoreError as e:  # the gateway is up later than its process
            raise ConnectionError(str(e)) from e


KINDS: dict[str, Kind] = {
    "seaweedfs": _SeaweedFS(),
    "moto": Kind(),
    "rclone": _Rclone(),
    "gcs": _Gcs(),
    "azurite": _Azurite(),
    "ceph": _Ceph(),
}


# --- the keeper -------------------------------------------------------------------------------


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def started(kind: str) -> Iterator[Server]:
    """Start a server of one's own, with a folder of its own; kill it at the end."""
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 8 << 30
    with tempfile.TemporaryDirectory(
        prefix="casnap-server-", dir=memory if roomy else None, ignore_cleanup_errors=True
    ) as folder:
        for attempt in range(_STARTS):
            place = Path(folder, str(attempt))
            place.mkdir()
            # SeaweedFS takes those 10,000 above too.
            ports = [free_port(10_000) for _ in range(KINDS[kind].ports)]
            process = _spawn(KINDS[kind], place, ports)
            try:
                with KINDS[kind].front(ports[0]) as endpoint:
                    server = Server(kind, endpoint, KINDS[kind].inner(place, ports))
                    # Else another process took one of the ports.
                    if _is_ready(server, process):
                        yield server
                        return
                error = (place / "log").read_text(errors="replace")[-2000:]
            finally:
                process.kill()
                process.wait()
                KINDS[kind].clean(ports)
        raise RuntimeError(error)


def _spawn(kind: Kind, folder: Path, ports: list[int]) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            kind.command(folder, ports),
            cwd=folder,
            env={**os.environ, **kind.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_die_with_parent,
        )


def _is_ready(server: Server, process: subprocess.Popen[bytes]) -> bool:
    """Wait until an object can be put and read; False if the server ended.

    SeaweedFS answers seconds before that: its parts find one another later, and until then some
    requests fail.
    """
    from casnap.backends import backend_at
    from casnap.errors import StoreError

    bucket = Bucket(server, "casnap-is-ready")
    deadline = time.monotonic() + _READY_SECONDS
    made = False
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if not made:
                KINDS[server.kind].make_bucket(server, bucket.name)
                made = True
            once = {**bucket.storage_options, "casnap": {"attempts": 1}}
            backend = backend_at(f"{bucket.uri}/tried", once)
            for number in range(_PUTS):
                backend.write(f"{number}", b"ready")
                backend.read(f"{number}")
        except (OSError, StoreError):
            time.sleep(0.05)
        else:
            return True
    return False


def _keep(kind: str, at: Path) -> None:
    """Start a server, tell each who connects where it is, and end when all have hung up."""
    waiting = at.with_suffix(".new")
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(str(waiting))
        listener.listen(64)
        waiting.rename(at)
        try:
            with started(kind) as server:
                _serve(listener, selector, json.dumps(asdict(server)))
        except (OSError, RuntimeError) as e:
            line, _ = listener.accept()
            line.sendall(json.dumps({"error": str(e)}).encode() + b"\n")


def _serve(listener: socket.socket, selector: selectors.BaseSelector, answer: str) -> None:
    selector.register(listener, selectors.EVENT_READ)
    users = 0
    first = True
    while users or first:
        for key, _ in selector.select():
            if key.fileobj is listener:
                line, _ = listener.accept()
                line.sendall(answer.encode() + b"\n")
                selector.register(line, selectors.EVENT_READ)
                users, first = users + 1, False
            else:
                selector.unregister(key.fileobj)
                users -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Start an object store on loopback.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--socket", type=Path, help="end when all who connect here have hung up")
    options = parser.parse_args()
    if options.socket is not None:
        _keep(options.kind, options.socket)
        return
    with started(options.kind) as server, server.bucket() as bucket:
        print(bucket.uri, json.dumps(bucket.storage_options), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
