"""A framework that is missing, or of a version that was not tried, is one clear error."""

from __future__ import annotations

import importlib
import logging
import sys
from importlib import metadata
from pathlib import Path

import pytest

from casnap.integrations.trainers import check_version

# Each with the package that it is of.
FRAMEWORKS = {
    "lightning": "lightning",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "megatron": "megatron-core",
    "torch_checkpointing": "torch_checkpointing",
    "torchtitan": "torchtitan",
}


@pytest.mark.parametrize(("framework", "package"), FRAMEWORKS.items())
def test_a_framework_that_is_missing(framework: str, package: str) -> None:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    else:
        pytest.skip(f"{framework} is installed")
    install = rf"pip install '/path/to/casnap\[{framework}\]'"
    wanted = rf"{package} >=.*,<.*, and it is not installed: {install}"
    with pytest.raises(ImportError, match=wanted):
        importlib.import_module(f"casnap.integrations.{framework}")


def test_a_framework_of_another_version() -> None:
    found = metadata.version("msgspec")
    check_version("msgspec", "0.1", "9000")
    check_version("msgspec", found, "9000")
    for first, below in (("0.1", found), ("9000", "9001")):
        with pytest.raises(ImportError, match=f"this is msgspec {found}: pip install"):
            check_version("msgspec", first, below)


VLLM = {
    "another version": "__version__ = '0.33.0'",
    "a known version that has changed": "__version__ = '0.32.9'",
    "broken": "raise RuntimeError('no driver')",
    "without a version": "",
}


@pytest.mark.parametrize("vllm", VLLM)
def test_a_vllm_that_casnap_does_not_know_goes_on(
    tmp_path: Path, vllm: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each process of vLLM calls this, also for users who never asked for the backend."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(VLLM[vllm])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    plugin = importlib.import_module("casnap.integrations.vllm")
    with caplog.at_level(logging.DEBUG, "casnap"):
        plugin.register()
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert "has no backend 'casnap'" in caplog.text
    sys.modules.pop("vllm", None)
