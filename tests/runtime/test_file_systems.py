"""One table of file systems answers who asks one, and who reads the list of mounts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from casnap.runtime.file_systems import is_on_shared, mount_of, mounts, name_lag
from tests.support.mounts import bindfs, tmpfs


def both_say(folder: str) -> bool:
    """Return whether other hosts may use the file system of a folder, which both ways must say."""
    by_list = is_on_shared(folder.rstrip("/"))
    with suppress(OSError):
        assert (name_lag(folder) > 0) == by_list, mount_of(Path(folder))
    return by_list


def test_the_mounts_of_this_host() -> None:
    """Types that the table lacks, such as that of /proc, count as shared both ways."""
    found = {mount.kind: both_say(mount.folder) for mount in mounts() if mount.kind != "fuseblk"}
    assert found["proc"]


def test_a_disk_and_a_client(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    with tmpfs(tmp_path / "disk", "1M") as disk, bindfs(tmp_path / "below", tmp_path / "a") as a:
        assert not both_say(str(disk))
        assert both_say(str(a))
