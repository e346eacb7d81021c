"""Manifests with bad ranks: a clear error each time."""

from __future__ import annotations

import pytest

from casnap import Store
from casnap.errors import DamagedError
from tests.support.forger import STATE, Forger, assert_refused


@pytest.fixture
def forger(tmp_path, cache_dir):
    return Forger(tmp_path / "store")


@pytest.mark.parametrize("names", [["1", "2"], ["0", "01"], ["0", "-1"], ["0", "x"], ["0", "²"]])
def test_ranks_that_are_none(forger, names):
    forger.row = {"world_size": 2}
    tree = forger.tree(STATE, ["/x", ["v", [1, b"\x01", b"", 0], "int"]])
    forger.publish({}, {"global": {"s": tree}, "ranks": {name: {} for name in names}})
    assert_refused(forger.folder)
    with pytest.raises(DamagedError, match="claims 2 ranks"):
        Store(forger.folder)["evil"].get_manifest()
