"""A trainer whose bucket holds deltas, and hosts that pull from there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from casnap import StateDict, Store
from casnap.serving import PullOptions, PullReport, verify
from tests.support.remote import RemoteDouble
from tests.support.served import tensors_in


class Run:
    """A trainer that moves some elements of each chunk a step, and its bucket.

    Attributes:
        weights: The weights.
        store: The store of the trainer.
        bucket: That of the bucket.
    """

    def __init__(self, folder: Path, layers: int = 4) -> None:
        self._dice = torch.Generator().manual_seed(0)
        self.weights = {
            f"layers.{i}": torch.randn(1 << 20, generator=self._dice).bfloat16()
            for i in range(layers)
        }
        self.store = Store(folder / "trainer")
        self.bucket = Store(RemoteDouble(str(folder)))
        self._step = 0

    def move(self) -> str:
        """Take the next step, and return its name."""
        for weight in self.weights.values():
            bits = weight.view(torch.int16)
            bits[torch.randint(len(bits), (len(bits) // 50,), generator=self._dice)] += 1
        name = f"run/step_{self._step}"
        self._step += 1
        self.store.take({"model": StateDict(self.weights)}, name)
        return name

    def step(self) -> int:
        """Take the next step, copy it to the bucket, and return how many bytes that took."""
        return self.store.copy(self.move(), to=self.bucket).sent_bytes

    def assert_served(self, live: Path) -> None:
        found = tensors_in(live)
        assert found.keys() == self.weights.keys()
        assert all(torch.equal(found[name], weight) for name, weight in self.weights.items())
        assert verify(live) == []

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())


class Host:
    """A host that pulls from the bucket, with caches of its own.

    Attributes:
        bucket: What counts its requests of the last pull.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "live") -> None:
        self.bucket = RemoteDouble(str(folder))
        self._store = Store(self.bucket)
        self._live = folder / name
        self._cache = folder / f"cache-of-{name}"
        self._cache.mkdir()
        self._monkeypatch = monkeypatch

    def pull(self, options: PullOptions | None = None) -> PullReport:
        self.bucket.reset()
        with self._monkeypatch.context() as patch:
            patch.setenv("CASNAP_CACHE_DIR", str(self._cache))
            return self._store.pull(self._live, options=options)
