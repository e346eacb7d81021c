"""An interrupt at the moments that leave the most behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import StateDict, Store
from casnap.runtime.threads import Worker, collector_paused
from casnap.take import pending


def interrupted_at(moment: str) -> type[Worker]:
    """Return a class of threads; one interrupt comes while one of them is made or started."""
    met: list[str] = []

    def here(now: str) -> None:
        if now == moment and not met:
            met.append(now)
            raise KeyboardInterrupt

    class Interrupted(Worker):
        def __init__(self, *args: Any) -> None:
            here("made")
            super().__init__(*args)

        def start(self) -> None:
            here("before it starts")
            super().start()
            here("after it started")

    return Interrupted


@pytest.mark.parametrize("moment", ["made", "before it starts", "after it started"])
def test_an_async_take_whose_thread_begins(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store", chunk_size=64 << 10)
    state = {"s": StateDict(x=torch.randn(100_000))}
    monkeypatch.setattr(pending, "Worker", interrupted_at(moment))
    with pytest.raises(KeyboardInterrupt):
        store.async_take(state, "step_1")
    store.async_take(state, "step_2").wait()
    store.take(state, "step_3")
    names = {s.name for s in store.snapshots()}
    assert names - {"step_1"} == {"step_2", "step_3"}
    for name in names:
        assert torch.equal(store[name].read_object("s/x"), state["s"]["x"])


def test_the_collector_of_python_is_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    disable = gc.disable

    def interrupted() -> None:
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    with pytest.raises(KeyboardInterrupt), collector_paused():
        pass
    assert gc.isenabled()
