"""The small files beside weights, such as a configuration and a tokenizer."""

from __future__ import annotations

from pathlib import Path

from casnap.backends.local_files import is_file, paths_in
from casnap.format.names import is_file_name

FILES = "files"
"""The key of the small files in a snapshot: a dict from name to str or bytes."""
INDEX_SUFFIX = ".index.json"
"""The suffix of the name of an index of shards."""
_MOST_BYTES = 256 << 20
# Loaders may take such files for weights, or unpickle them. An index would name shards of another
# export.
_NOT_CARRIED = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5", ".ot"),
    *(".gguf", ".onnx", ".npz", ".tflite"),
    *(f".safetensors{INDEX_SUFFIX}", f".bin{INDEX_SUFFIX}"),
)


def is_carried(name: str, nbytes: int) -> bool:
    """Whether an import stores a file beside weights, by its name and its length in bytes."""
    return (
        is_file_name(name)
        and not name.lower().startswith("casnap-")
        and not name.lower().endswith(_NOT_CARRIED)
        and nbytes <= _MOST_BYTES
    )


def small_files(folder: Path) -> dict[str, bytes]:
    """Return the small files, right in a folder of weights, that an import stores; by name."""
    return {
        file.name: file.read_bytes()
        for file in paths_in(folder)
        if is_file(file) and is_carried(file.name, file.stat().st_size)
    }
