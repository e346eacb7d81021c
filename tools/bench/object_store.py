"""Takes, restores and reads on an S3 server of this machine, beside raw requests and peers.

The server (SeaweedFS) runs on the same cores, so every contender pays for it alike. The limit is
the same bytes by the same client, in objects of 48 MiB and ranges of 16 MiB, and nothing else.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from casnap import Snapshot, StateDict
from casnap.backends import Backend, backend_at
from tests.support.faulty import FaultyProxy, HttpFault, delay
from tests.support.servers import Bucket, shared
from tools.bench import peers, states
from tools.bench.measure import PeakMemory, Times, rotated, seconds, settle
from tools.bench.settings import MIB, Settings
from tools.bench.states import State
from tools.bench.table import Row, timed

TRANSFERS = "S3 server on this machine"
READS = "read_object of 10 MB, S3 server 50 ms away"
WORKLOADS = (TRANSFERS, READS)

_OBJECT = 48 * MIB
_RANGE = 16 * MIB
_CHANGED_SHARE = 0.01
_TENSOR = 10_000_000
_TENSORS = 100
_NEAR, _FAR = 0.05, 0.25

S3FS = "s3fs + torch.save"
CONNECTOR = "dcp, s3torchconnector"
FSSPEC = "dcp, FsspecWriter"

Save = Callable[[State, str], None]


# --- the contenders ---------------------------------------------------------------------------


def casnap_take(state: State, uri: str) -> None:
    """Take a snapshot; the parent prefix is, or becomes, the store."""
    Snapshot.take(uri, {"model": StateDict(**state)})


def casnap_restore(state: State, uri: str) -> None:
    """Restore in place, from a snapshot that is opened anew."""
    Snapshot(uri).restore({"model": StateDict(**state)})


def _restore_opened(state: State, snapshot: Snapshot) -> None:
    snapshot.restore({"model": StateDict(**state)})


def fsspec_save(state: State, uri: str) -> None:
    """Save by dcp's writer over fsspec."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    dcp.save({"model": state}, storage_writer=FsspecWriter(uri))


def fsspec_load(state: State, uri: str) -> None:
    """Load in place by dcp's reader over fsspec."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    dcp.load({"model": state}, storage_reader=FsspecReader(uri))


def connector_save(state: State, uri: str) -> None:
    """Save by dcp and the writer of s3torchconnector."""
    from s3torchconnector.dcp import S3StorageWriter

    writer = S3StorageWriter("us-east-1", uri, s3client_config=_connector_config())
    writer.fs._client = _connector_client()
    dcp.save({"model": state}, storage_writer=writer)


def connector_load(state: State, uri: str) -> None:
    """Load in place by dcp and the reader of s3torchconnector."""
    from s3torchconnector.dcp import S3StorageReader

    reader = S3StorageReader("us-east-1", uri, s3client_config=_connector_config())
    reader.fs._client = _connector_client()
    dcp.load({"model": state}, storage_reader=reader)


def _connector_config() -> Any:
    from s3torchconnector import S3ClientConfig

    return S3ClientConfig(force_path_style=True)


def _connector_client() -> Any:
    from s3torchconnector._s3client import S3Client

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    return S3Client("us-east-1", endpoint=endpoint, s3client_config=_connector_config())


def s3fs_save(state: State, uri: str) -> None:
    """Save by ``torch.save`` into a file of s3fs."""
    import fsspec

    with fsspec.open(uri, "wb") as file:
        torch.save(state, file)


def s3fs_load(state: State, uri: str) -> None:
    """Load a file of s3fs and copy it into the tensors."""
    import fsspec

    with fsspec.open(uri, "rb") as file:
        found = torch.load(file, weights_only=True)
    for name, tensor in state.items():
        tensor.copy_(found[name])


def torchsnapshot_take(state: State, uri: str) -> None:
    """Take by TorchSnapshot."""
    import torchsnapshot

    torchsnapshot.Snapshot.take(uri, {"model": torchsnapshot.StateDict(**state)})


def torchsnapshot_restore(state: State, uri: str) -> None:
    """Restore in place by TorchSnapshot."""
    import torchsnapshot

    torchsnapshot.Snapshot(uri).restore({"model": torchsnapshot.StateDict(**state)})


def contenders() -> dict[str, tuple[Save, Save]]:
    """Return how each installed peer saves, and loads in place what it saved."""
    found = {FSSPEC: (fsspec_save, fsspec_load), S3FS: (s3fs_save, s3fs_load)}
    if peers.installed("s3torchconnector"):
        found[CONNECTOR] = (connector_save, connector_load)
    if peers.installed("torchsnapshot"):
        found[peers.TORCHSNAPSHOT] = (torchsnapshot_take, torchsnapshot_restore)
    return found


# --- the limit --------------------------------------------------------------------------------


class RawObjects:
    """Puts and ranged gets of a number of bytes by casnap's own client, from warm buffers."""

    def __init__(self, backend: Backend, nbytes: int) -> None:
        self._backend = backend
        whole, rest = divmod(nbytes, _OBJECT)
        self._sizes = [_OBJECT] * whole + [rest] * bool(rest)
        self._noise = memoryview(bytearray(os.urandom(_OBJECT)))
        self._buffers = [memoryview(bytearray(_RANGE)) for _ in range(backend.in_flight)]

    def put(self) -> None:
        """Put all objects."""
        self._share(self._put_one, list(enumerate(self._sizes)), 4)

    def get(self) -> None:
        """Get all objects, range by range."""
        ranges = [
            (number, offset, min(_RANGE, size - offset))
            for number, size in enumerate(self._sizes)
            for offset in range(0, size, _RANGE)
        ]
        self._share(self._get_one, ranges, len(self._buffers))

    def _put_one(self, object_: tuple[int, int]) -> None:
        number, size = object_
        self._backend.write(f"raw/{number}", self._noise[:size])

    def _get_one(self, part: tuple[int, int, int]) -> None:
        number, offset, size = part
        buffer = self._buffers.pop()
        self._backend.read_into(f"raw/{number}", [(offset, buffer[:size])])
        self._buffers.append(buffer)

    @staticmethod
    def _share(work: Callable[[Any], None], parts: list[Any], threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, parts))


# --- the figures ------------------------------------------------------------------------------


@contextmanager
def environment(bucket: Bucket) -> Iterator[None]:
    """Name the server and the user as all clients find them: in the environment."""
    options = bucket.storage_options
    os.environ |= {
        "AWS_ENDPOINT_URL": options["endpoint_url"],
        "AWS_ACCESS_KEY_ID": options["key"],
        "AWS_SECRET_ACCESS_KEY": options["secret"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
    }
    yield


class Transfers:
    """Saves and loads of one state by every contender, each repetition in another order."""

    def __init__(self, settings: Settings, bucket: Bucket) -> None:
        self.uri = bucket.uri
        self.contenders = contenders() if settings.with_peers else {}
        self.state = states.fp32(settings.nbytes // 2, 200)
        self.nbytes = states.nbytes_of(self.state.values())
        self.target = states.like(self.state)
        self.raw = RawObjects(backend_at(f"{bucket.uri}/raw"), self.nbytes)
        self.times: Times = defaultdict(list)
        self.ratios: Times = defaultdict(list)
        self.changed = 0
        self._number = 0
        self.extra = self._memory()

    def repetition(self, turn: int) -> None:
        """Save and load once by every contender; casnap between two raw transfers."""
        store = self._new()
        self._beside("put", self.raw.put, "first", casnap_take, self.state, f"{store}/step_0")
        self._beside("get", self.raw.get, "restore", casnap_restore, self.target, f"{store}/step_0")
        opened = Snapshot(f"{store}/step_0")
        self._beside("get", self.raw.get, "opened", _restore_opened, self.target, opened)
        if not states.same(self.state, self.target):
            raise RuntimeError("casnap did not bring the state back")
        self._time("unchanged", casnap_take, self.state, f"{store}/step_1")
        some = states.some(self.state, _CHANGED_SHARE, turn)
        states.step(some)
        self.changed = states.nbytes_of(some)
        self._time("changed", casnap_take, self.state, f"{store}/step_2")
        for name in rotated(list(self.contenders), turn):
            save, load = self.contenders[name]
            uri = self._new()
            self._time(f"save: {name}", save, self.state, uri)
            self._time(f"load: {name}", load, self.target, uri)
            if not states.same(self.state, self.target):
                raise RuntimeError(f"{name} did not bring the state back")

    def _memory(self) -> int:
        """Return the extra memory of a take and a restore; looking at it takes time of its own."""
        uri = f"{self._new()}/step_0"
        with PeakMemory() as peak:
            casnap_take(self.state, uri)
            casnap_restore(self.target, uri)
        return peak.extra

    def _new(self) -> str:
        self._number += 1
        return f"{self.uri}/saved-{self._number}"

    def _beside(
        self, limit: str, raw: Callable[[], None], name: str, work: Callable[..., None], *args: Any
    ) -> None:
        before = self._time(limit, raw)
        took = self._time(name, work, *args)
        after = self._time(limit, raw)
        self.ratios[name].append((before + after) / 2 / took)

    def _time(self, name: str, work: Callable[..., None], *arguments: Any) -> float:
        settle()
        took = seconds(work, *arguments)
        self.times[name].append(took)
        return took


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload."""
    with ExitStack() as stack:
        folder = settings.path("servers", "s").parent
        server = stack.enter_context(shared("seaweedfs", folder))
        bucket = stack.enter_context(server.bucket())
        stack.enter_context(environment(bucket))
        if workload == READS:
            return [row.to_json() for row in _read_rows(settings, bucket, workload)]
        transfers = Transfers(settings, bucket)
        for turn in range(settings.repeat):
            transfers.repetition(turn)
        return [row.to_json() for row in _rows(transfers, workload)]


def _read_rows(settings: Settings, bucket: Bucket, workload: str) -> list[Row]:
    """Open a snapshot and read one tensor, by a host that knows the store and by one that does not.

    How much longer it takes from farther away says how many round trips follow one another.
    """
    state = states.fp32(_TENSOR * _TENSORS, _TENSORS)
    casnap_take(state, f"{bucket.uri}/run/step_1")
    with FaultyProxy(bucket.server.endpoint) as proxy:
        rows = []
        for name, is_warm, bound in (("cold cache", False, 6), ("warm cache", True, 2)):
            near, far = (
                [
                    _read(settings, proxy, bucket, seconds_away, is_warm=is_warm)
                    for _ in range(settings.repeat)
                ]
                for seconds_away in (_NEAR, _FAR)
            )
            trips = [round((b - a) / (_FAR - _NEAR)) for a, b in zip(near, far, strict=True)]
            row = timed(workload, f"{peers.CASNAP}, {name}", near)
            rows.append(row.at_most(trips, " round trips", bound))
        return rows


def _read(
    settings: Settings, proxy: FaultyProxy, bucket: Bucket, seconds_away: float, *, is_warm: bool
) -> float:
    cache = settings.path("caches", "warm" if is_warm else os.urandom(8).hex())
    cache.mkdir(exist_ok=True)
    os.environ["CASNAP_CACHE_DIR"] = str(cache)
    options = {**bucket.storage_options, "endpoint_url": proxy.url}

    def read() -> None:
        snapshot = Snapshot(f"{bucket.uri}/run/step_1", storage_options=options)
        snapshot.read_object("0/model/tensor.7")

    if is_warm:
        read()
    with proxy.during(HttpFault(delay(seconds_away), times=None)):
        return seconds(read)


def _rows(done: Transfers, workload: str) -> list[Row]:
    times, nbytes = done.times, done.nbytes
    size = f"{workload}, {nbytes / MIB:.0f} MiB"
    take, restore = f"first take: {size}", f"restore in place, verified: {size}"
    changed = f"take with 1 % of tensors ({done.changed / MIB:.0f} MiB) changed: {size}"
    rows = [
        timed(take, peers.CASNAP, times["first"], nbytes),
        timed(take, "limit: puts of 48 MiB, same client", times["put"], nbytes).at_least(
            done.ratios["first"], " of the limit", 0.9
        ),
        *_peer_rows(take, "save", done, times["first"]),
        timed(restore, peers.CASNAP, times["restore"], nbytes),
        timed(restore, "limit: gets of 16 MiB, same client", times["get"], nbytes).at_least(
            done.ratios["restore"], " of the limit", 0.85
        ),
        timed(restore, f"{peers.CASNAP}, in a snapshot that is open", times["opened"]).at_least(
            done.ratios["opened"], " of the limit", 0.92
        ),
        *_peer_rows(restore, "load", done, times["restore"]),
        timed(f"take with nothing changed: {size}", peers.CASNAP, times["unchanged"]),
        timed(changed, peers.CASNAP, times["changed"]),
    ]
    memory = Row(
        f"extra memory of take and restore: {size}", peers.CASNAP, f"{done.extra / MIB:.0f} MiB"
    )
    return [*rows, memory.within(done.extra / MIB, 600, "≤ 600 MiB")]


def _peer_rows(work: str, verb: str, done: Transfers, ours: list[float]) -> Iterator[Row]:
    for name in done.contenders:
        theirs = done.times[f"{verb}: {name}"]
        ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
        row = timed(work, name, theirs, done.nbytes)
        yield row.at_least(ratios, "× as fast", 1)
