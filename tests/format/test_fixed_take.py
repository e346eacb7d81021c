"""The bytes of a fixed take: what is equal is stored as the same bytes by every version.

If a digest here has to change, versions no longer share the chunks and nodes of equal states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from blake3 import blake3

from casnap import NewStore, StateDict, Store
from tests.support.golden import CHUNK, kinds

# Newer versions of torch say that some dtypes go; stores that hold them stay.
pytestmark = pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")

MANIFEST = "210b3cb4564c26030500884320c9bdd0d9ca4b075261689697dc98708e4d39cc"
PACK = "2fa556ac2af8cbd21479b493275483269722c3e7bfde10a148460b91da8a81bb"
ROOT = [
    *("seq", "commit", "time", "fence", "table", "segments", "condemned", "lost"),
    *("read_features", "write_features", "settings", "store", "writer", "copies"),
]
ROW = ["commit", "manifest", "seq", "time", "world_size", "stats", "metadata", "tags"]


def taken(folder: Path, state: dict[str, Any], **options: Any) -> Store:
    store = Store(folder, create=NewStore(chunk_size=CHUNK), environment=False).make()
    store.take(state, "run/1", **options)
    return store


def test_trees_of_every_kind_of_entry(tmp_path: Path) -> None:
    store = taken(tmp_path, kinds())
    assert store._view.row_of("run/1").manifest.digest.hex() == MANIFEST


def test_a_pack_of_chunks(tmp_path: Path) -> None:
    """A raw chunk on its page, small ones twice, and the footer."""
    state = StateDict(w=torch.arange(20_000), b=torch.arange(100), text="text " * 100)
    taken(tmp_path, {"s": state})
    packs = [path.read_bytes() for path in tmp_path.glob("casnap-store/packs/*/*")]
    [pack] = [content for content in packs if content[-40:-32] == b"CASNAPp1"]
    assert blake3(pack).hexdigest() == PACK


def test_the_fields_of_a_root_and_a_row(tmp_path: Path) -> None:
    store = taken(tmp_path, {"s": StateDict(x=1)}, metadata={"loss": 0.5})
    store.tag("run/1", "best")
    root = msgspec.msgpack.decode((tmp_path / "casnap-store/roots/0/2").read_bytes()[8:-32])
    assert list(root) == ROOT
    assert list(root["store"]) == ["format", "digest", "store_id", "chunk_size", "put_if_absent"]
    [[name, row]] = msgspec.msgpack.decode(store._view.repository.node(root["table"][0]))[1]
    assert (name, list(row)) == ("run/1", ROW)
