"""What is published for SGLang's ``/pull_weights``, against a stub that reads as its sources do."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from blake3 import blake3
from safetensors import safe_open

from casnap.errors import CasnapError, DamagedError, FileFormatError
from casnap.integrations.engines import pull_sglang
from casnap.integrations.sglang import publish_version
from casnap.runtime.typing import override
from casnap.serving import PullOptions
from tests.support.served import store_at, take, tensors_in, weights

KEPT = PullOptions(keep=3)


class Host:
    """A host of an engine: it has a checkpoint, and the number of it.

    Args:
        local: Its folder.
        base: The folder of the model that the engine was started with.
    """

    def __init__(self, local: Path, base: Path) -> None:
        self.local, self._base = local, base
        self.number: int | None = None
        self.copied = 0

    def pull(self, source: Path, target: int) -> None:
        start, floor = target, self.number or 0
        while start > floor and self._delta(source, start):
            start -= 1
        if self.number is None or start > self.number:
            shutil.rmtree(self.local, ignore_errors=True)
            shutil.copytree(source / f"weight_v{start:06d}" if start else self._base, self.local)
            self.number, self.copied = start, self.copied + 1
        for number in range(self.number + 1, target + 1):
            self._apply(source / f"weight_v{number:06d}")

    def _delta(self, source: Path, number: int) -> bool:
        folder = source / f"weight_v{number:06d}"
        assert folder.is_dir(), f"{folder} is missing"
        index = folder / "model.safetensors.index.json"
        about = json.loads(index.read_text()) if index.exists() else {}
        return "delta_encoding" in about.get("metadata", {})

    def _apply(self, folder: Path) -> None:
        about = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
        assert int(about["base_version"]) == self.number
        assert (about["delta_encoding"], about["compression_format"]) == ("xor", "zstd")
        assert about["checksum_format"] == "blake3"
        places = {}
        for file in self.local.glob("*.safetensors"):
            raw = file.read_bytes()
            size = int.from_bytes(raw[:8], "little")
            for name, tensor in json.loads(raw[8 : 8 + size]).items():
                if name != "__metadata__":
                    start, stop = tensor["data_offsets"]
                    places[name] = file, 8 + size + start, stop - start
        for delta in folder.glob("*.safetensors"):
            with safe_open(delta, "np") as opened:
                checksums = opened.metadata()
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    file, start, size = places[name]
                    content = np.memmap(file, np.uint8, "r+")
                    reader = zstandard.ZstdDecompressor().stream_reader(
                        opened.get_tensor(name).tobytes()
                    )
                    content[start : start + size] ^= np.frombuffer(reader.read(size), np.uint8)
                    now = blake3(content[start : start + size].tobytes()).hexdigest()
                    assert now == checksums[name], name
        self.number = int(about["version"])


def assert_has(host: Host, folder: Path) -> None:
    found, expected = tensors_in_any(host.local), tensors_in(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for name in ("config.json",):
        assert (host.local / name).read_text() == (folder / name).read_text()


def tensors_in_any(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {n: opened.get_tensor(n).clone() for n in opened.keys()}  # noqa: SIM118
    return tensors


def published(source: Path) -> list[str]:
    return sorted(path.name for path in source.iterdir())


@pytest.mark.parametrize("shard", [5_000_000_000, 300_000])
def test_hosts_pull_what_is_published(tmp_path: Path, shard: int) -> None:
    store, source = store_at(tmp_path / "store"), tmp_path / "source"
    options = PullOptions(keep=3, max_shard_size=shard)
    hosts = [Host(tmp_path / f"local{i}", tmp_path / "base") for i in range(3)]
    for step in range(8):
        # The configuration stays, so that versions differ in tensors alone.
        take_step(store, step)
        folder = Path(store.pull(tmp_path / "live", options=options).folder)
        assert publish_version(source, folder, full_every=3) == step + 1
        assert publish_version(source, folder, full_every=3) == step + 1
        hosts[0].pull(source, step + 1)
        assert_has(hosts[0], folder)
        if step in (2, 7):
            hosts[1].pull(source, step + 1)
            assert_has(hosts[1], folder)
    hosts[2].pull(source, 8)
    assert_has(hosts[2], folder)
    # Whole ones are 1 and 5; deltas between, of a hundredth of that.
    assert [hosts[0].copied, hosts[2].copied] == [2, 1]
    sizes = {
        name: sum(file.stat().st_size for file in (source / name).iterdir())
        for name in published(source)
    }
    assert list(sizes) == [f"weight_v{number:06d}" for number in range(1, 9)]
    assert sizes["weight_v000004"] < sizes["weight_v000005"] / 20


def take_step(store: Any, step: int) -> None:
    from casnap import StateDict

    model = weights(step) | {"layers.2": weights(0)["layers.2"] * (step % 3)}
    state = {"model": StateDict(model), "files": StateDict({"config.json": "{}"})}
    store.take(state, f"step_{step}")


def test_old_ones_are_deleted_and_what_cannot_be_a_delta_is_whole(tmp_path: Path) -> None:
    store, source = store_at(tmp_path / "store"), tmp_path / "source"
    host = Host(tmp_path / "local", tmp_path / "base")
    for step in range(3):
        take_step(store, step)
        publish_version(source, Path(store.pull(tmp_path / "live", options=KEPT).folder), 1)
    assert published(source) == [f"weight_v{number:06d}" for number in (1, 2, 3)]
    # Another configuration, then another shape; and one whose base is gone.
    take(store, 3)
    publish_version(source, Path(store.pull(tmp_path / "live", options=KEPT).folder))
    take(store, 4, norm=torch.zeros(3))
    folder = Path(store.pull(tmp_path / "live", options=KEPT).folder)
    assert publish_version(source, folder) == 5
    host.pull(source, 5)
    assert_has(host, folder)
    assert published(source) == ["weight_v000004", "weight_v000005"]
    # What a crash has left is no version.
    (source / ".weight_v000006.partial").mkdir()
    other = store_at(tmp_path / "other")
    take(other, 9, norm=torch.zeros(3))
    folder = Path(other.pull(tmp_path / "other_live").folder)
    assert publish_version(source, folder) == 6
    host.pull(source, 6)
    assert_has(host, folder)
    assert published(source) == ["weight_v000005", "weight_v000006"]
    with pytest.raises(FileFormatError, match="no version that a pull has made"):
        publish_version(source, tmp_path)


def test_damage_is_not_published(tmp_path: Path) -> None:
    store, source = store_at(tmp_path / "store"), tmp_path / "source"
    take_step(store, 0)
    publish_version(source, Path(store.pull(tmp_path / "live").folder))
    take_step(store, 1)
    folder = Path(store.pull(tmp_path / "live").folder)
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[raw.index(weights(1)["layers.1"].view(torch.uint8).numpy().tobytes())] ^= 1
    file.write_bytes(raw)
    # As a delta, and whole.
    for to, there in ((source, ["weight_v000001"]), (tmp_path / "new", [])):
        with pytest.raises(DamagedError, match=r"does not hold what was pulled for layers\.1"):
            publish_version(to, folder)
        assert published(to) == there


class Handler(BaseHTTPRequestHandler):
    """A stub of SGLang's server on two hosts."""

    hosts: list[Host]
    calls: list[Any]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = 200, dict[str, Any](success=True)
        self.calls.append(self.path)
        if self.path == "/pull_weights" and not self.hosts:
            # As SGLang 0.5.23, which has no such call.
            status, answer = 404, {"detail": "Not Found"}
        elif self.path == "/pull_weights":
            assert Path(asked["local_checkpoint_dir"]).name == "local"
            for host in self.hosts:
                host.pull(Path(asked["source_dir"]), asked["target_version"])
        elif len(self.calls) == 5:  # of the second version, at first
            status, answer = 400, {"success": False}
        else:
            self.calls.append(asked["weight_version"])
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    @override
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def sglang(hosts: list[Host]) -> Iterator[tuple[str, list[Any]]]:
    calls: list[Any] = []
    handler = type("H", (Handler,), {"hosts": hosts, "calls": calls})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", calls
        finally:
            server.shutdown()
            thread.join()


def test_an_engine_over_two_hosts_pulls_and_loads(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    hosts = [Host(tmp_path / f"host{i}" / "local", tmp_path / "base") for i in range(2)]
    with sglang(hosts) as (url, calls):
        callback = pull_sglang(url, tmp_path / "source", tmp_path / "local")
        for step in range(2):
            take_step(store, step)
            folder = Path(store.pull(tmp_path / "live").folder)
            if step:
                with pytest.raises(CasnapError, match="answers 400"):
                    callback(folder, [])
            callback(folder, [])
            for host in hosts:
                assert_has(host, folder)
            assert calls[-1] == folder.name
        assert hosts[0].number == 2
        assert hosts[0].copied == 1


def test_a_server_that_has_no_such_call(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    take_step(store, 0)
    folder = Path(store.pull(tmp_path / "live").folder)
    with sglang([]) as (url, _):
        callback = pull_sglang(url, tmp_path / "source", tmp_path / "local")
        with pytest.raises(CasnapError, match=r"answers 404: .*no such call: .*reload_sglang"):
            callback(folder, [])
