"""Saves through ``torch.distributed.checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from casnap import Snapshot, Store
from casnap.integrations.dcp import CasnapWriter


def save(store: Store, name: str, state: dict[str, Any], **options: Any) -> Snapshot:
    """Save a state as a snapshot of a name; return it."""
    writer = CasnapWriter(store)
    dcp_save(state, checkpoint_id=name, storage_writer=writer, **options)
    assert writer.snapshot is not None
    return writer.snapshot


def files_of_dcp(folder: Path) -> list[Path]:
    """Return the files that DCP itself has written: those of ``install`` only have its names."""
    found = (*folder.rglob("*.metadata"), *folder.rglob("*.distcp"))
    return [path for path in found if b"casnap" not in path.read_bytes()[:20]]
