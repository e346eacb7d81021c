"""A framework that is missing, or of a version that was not tried, is one clear error."""

from __future__ import annotations

import importlib
from importlib import metadata

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
    wanted = rf"{package} >=.*,<.*, and it is not installed: pip install 'casnap\[{framework}\]'"
    with pytest.raises(ImportError, match=wanted):
        importlib.import_module(f"casnap.integrations.{framework}")


def test_a_framework_of_another_version() -> None:
    found = metadata.version("msgspec")
    check_version("msgspec", "0.1", "9000")
    check_version("msgspec", found, "9000")
    for first, below in (("0.1", found), ("9000", "9001")):
        with pytest.raises(ImportError, match=f"this is msgspec {found}: pip install"):
            check_version("msgspec", first, below)
