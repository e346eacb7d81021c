"""What this version does with a store that a later version has written into.

Each case is forged. The page of the format has the same table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.later import WORKS, Forge, forged, leaf_with, outcomes

UNSUPPORTED = "UnsupportedFormatError"
ENTRY_IS_REFUSED = {"restore": UNSUPPORTED, "read": UNSUPPORTED}

ENTRIES: dict[str, Forge] = {
    "sort": leaf_with(lambda p: ["z", p, {"of": "a later version"}]),
    "kind of value": leaf_with(lambda p: ["v", p, "qubit"]),
    "kind of container": leaf_with(lambda p: ["c", p, "bag", 3]),
    "kind of tensor": leaf_with(lambda p: ["t", p, "float32", [1000], "hologram", False, None]),
    "dtype": leaf_with(lambda p: ["t", p, "float99", [1000], "tensor", False, None]),
    "dtype of less than a byte": leaf_with(lambda p: ["t", p, "int4", [8000], "tensor"]),
    "long double of numpy": leaf_with(lambda p: ["t", p, "<f16", [250], "ndarray"]),
    "quantization scheme": leaf_with(
        lambda p: ["t", p, "qint8", [4000], "tensor", False, ["per_block", b"", b"", 0]]
    ),
    "element of a tensor": leaf_with(
        lambda p: ["t", p, "float32", [1000], "tensor", False, None, [1]]
    ),
    "element of a quantization": leaf_with(
        lambda p: ["t", p, "qint8", [4000], "tensor", False, ["per_tensor_affine", b"", b"", 0, 1]]
    ),
    "element of a value": leaf_with(lambda p: ["v", p, "bytes", "zip"]),
    "element of a container": leaf_with(lambda p: ["c", p, "dict", 1, "ordered"]),
    "element of a payload": leaf_with(lambda p: ["v", [*p, 7], "bytes"]),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_what_is_unknown_costs_one_entry(tmp_path: Path, case: str) -> None:
    done = outcomes(forged(tmp_path / "store", ENTRIES[case]))
    assert {name: how for name, how in done.items() if how != WORKS} == ENTRY_IS_REFUSED
