"""Takes that ask the store what it has of a GPU's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.staying import known_stays


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["take", "async_take"])
def test_what_is_known_stays_there(tmp_path: Path, how: str) -> None:
    known_stays(tmp_path, torch.device("cuda", torch.cuda.current_device()), how)
