"""The bench of an accelerator, small, so that it does not fail where there is a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import hashing_device, late_device
from tools.bench import stays
from tools.bench.settings import Settings


@pytest.mark.parametrize("workload", stays.WORKLOADS)
def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: str) -> None:
    hashing_device.install(monkeypatch, "late:0")
    late_device.module.is_prompt = True
    monkeypatch.setattr(stays, "_WARM_UP", 0)
    settings = Settings(str(tmp_path), gib=0.004, repeat=1)
    assert torch.accelerator.current_accelerator(check_available=True) is not None
    rows = stays.measure(settings, workload)
    assert len(rows) == (11 if workload == stays.STAYS else 4)
    assert not any("none here" in row["contender"] for row in rows)
    if workload == stays.FROZEN:
        # The adapters, all digests, and the sample; not the base.
        assert all(float(row["median"].split()[0]) < 0.0005 for row in rows[1::2]), rows
