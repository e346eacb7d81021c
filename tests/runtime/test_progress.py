"""Bars that show the progress of long operations."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from casnap import Snapshot, StateDict, Store
from casnap.runtime import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class NotebookOutput(io.StringIO):
    """Standard error as it is in a notebook."""


NotebookOutput.__module__ = "ipykernel.iostream"


def take_and_restore(folder: Path, *, shown: bool = True) -> Snapshot:
    state = {"model": StateDict(w=torch.ones(1000))}
    pending = Store(folder).async_take(state, "step_1", progress=shown)
    snapshot = pending.wait()
    snapshot.restore(state, progress=shown)
    return snapshot


@pytest.mark.parametrize("screen", [Terminal, NotebookOutput])
def test_bars_are_shown_where_somebody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, screen: type[io.StringIO]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0)
    stream = screen()
    monkeypatch.setattr(sys, "stderr", stream)
    take_and_restore(tmp_path)
    for phase in ("storing", "reading"):
        assert f"{phase}: 100%" in stream.getvalue()
    assert "4.00k/4.00k" in stream.getvalue()


def test_nothing_is_shown_in_a_file_or_for_short_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream, shown in ((io.StringIO(), True), (Terminal(), True), (Terminal(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        take_and_restore(tmp_path / type(stream).__name__ / str(shown), shown=shown)
        assert stream.getvalue() == ""


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path).make()
    for call in (store.gc, store.check, store.repair):
        with pytest.raises(TypeError, match=r"progress is True, or a function .* got 3"):
            call(progress=3)  # type: ignore[arg-type]
