"""Manifests with boxes that do not tile a tensor, or with bad ranks: a clear error each time."""

from __future__ import annotations

from math import prod

import pytest
import torch

from casnap import Store
from casnap.errors import DamagedError
from tests.support.boxes import NO_TILINGS
from tests.support.forger import HUGE, STATE, Forger, assert_refused


@pytest.fixture
def forger(tmp_path, cache_dir):
    return Forger(tmp_path / "store")


def boxed(shape, boxes, payload, dtype="float32", kind="tensor"):
    return ["b", dtype, list(shape), payload, kind, False, None, boxes]


@pytest.mark.sampled
@pytest.mark.parametrize("where", ["in the entry", "in chunks"])
@pytest.mark.parametrize("case", NO_TILINGS)
def test_hostile_boxes(forger, case, where):
    shape, boxes = NO_TILINGS[case]
    if where == "in the entry":
        nbytes = min(4 * prod(shape), HUGE)
        payload = [nbytes, bytes(nbytes), b"", 0] if nbytes < 1 << 20 else [nbytes]
        x = boxed(shape, boxes, payload)
    else:
        nbytes = min(4096 * prod(shape), HUGE)
        x = boxed(shape, boxes, [nbytes, b"", forger.add(bytes(100)), 0], "|V4096", "ndarray")
    forger.publish({"s": forger.tree(STATE, ["/x", x])})
    assert_refused(forger.folder)
    if case != "huge":
        with pytest.raises(DamagedError, match=r"s/x: an entry has .*box"):
            Store(forger.folder)["evil"].read_object("s/x")


BOXES = {
    "text": "all",
    "nil": None,
    "numbers": [1, 2],
    "a box of one": [[[0, 0]]],
    "floats": [[[0.0, 0.0], [10.0, 10.0]]],
    "beyond 64 bits": [[[0, 0], [(1 << 64) - 1, 10]], [[(1 << 64) - 1, 0], [1, 10]]],
}


@pytest.mark.parametrize("case", BOXES)
def test_what_are_no_boxes(forger, case):
    x = boxed((10, 10), BOXES[case], [400, b"", forger.add(bytes(400)), 0])
    forger.publish({"s": forger.tree(STATE, ["/x", x])})
    assert_refused(forger.folder)


@pytest.mark.parametrize("digests", [0, 1, 3])
def test_as_many_digests_as_the_boxes_have_cells(forger, digests):
    chunk = forger.add(bytes(200))
    x = boxed((10, 10), [[[0, 0], [10, 5]], [[0, 5], [10, 5]]], [400, b"", chunk * digests, 0])
    forger.publish({"s": forger.tree(STATE, ["/x", x])})
    assert_refused(forger.folder)


def test_boxes_that_are_true(forger):
    """A correct manifest is accepted, so those above are refused for their fault alone."""
    chunk = forger.add(bytes(200))
    x = boxed((10, 10), [[[0, 0], [10, 5]], [[0, 5], [10, 5]]], [400, b"", chunk * 2, 0])
    forger.publish({"s": forger.tree(STATE, ["/x", x])})
    assert torch.equal(Store(forger.folder)["evil"].read_object("s/x"), torch.zeros(10, 10))


@pytest.mark.parametrize("names", [["1", "2"], ["0", "01"], ["0", "-1"], ["0", "x"], ["0", "²"]])
def test_ranks_that_are_none(forger, names):
    forger.row = {"world_size": 2}
    tree = forger.tree(STATE, ["/x", ["v", "int", [1, b"\x01", b"", 0]]])
    forger.publish({}, {"global": {"s": tree}, "ranks": {name: {} for name in names}})
    assert_refused(forger.folder)
    with pytest.raises(DamagedError, match="claims 2 ranks"):
        Store(forger.folder)["evil"].get_manifest()
