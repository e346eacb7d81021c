"""Which types of file systems other hosts may share, and what is mounted on this host."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

# The file systems in which this host alone changes names: the type in the list of mounts, and the
# number that `statfs` gives it. `fuseblk` has the number of FUSE, which servers have too.
_LOCAL = {
    "ext2": 0xEF53,
    "ext3": 0xEF53,
    "ext4": 0xEF53,
    "xfs": 0x58465342,
    "btrfs": 0x9123683E,
    "zfs": 0x2FC12FC1,
    "f2fs": 0xF2F52010,
    "bcachefs": 0xCA451A4E,
    "jfs": 0x3153464A,
    "reiserfs": 0x52654973,
    "hfsplus": 0x482B,
    "ntfs": 0x5346544E,
    "ntfs3": 0x7366746E,
    "fuseblk": None,
    "exfat": 0x2011BAB0,
    "vfat": 0x4D44,
    "msdos": 0x4D44,
    "tmpfs": 0x01021994,
    "devtmpfs": 0x01021994,
    "ramfs": 0x858458F6,
    "rootfs": 0x858458F6,
    "overlay": 0x794C7630,
    "squashfs": 0x73717368,
    # The disks of Windows below WSL 1.
    "lxfs": 0x53464846,
    "wslfs": 0x53464846,
    "drvfs": 0x53464846,
}
_LOCAL_NUMBERS = frozenset(_LOCAL.values())
# The most seconds that a client keeps what it knows of names: `acdirmax` of NFS.
_LAG = 60.0
# More bytes than `statfs` fills. Their first word is the number of the type.
_STATFS_BYTES = 256
_statfs = ctypes.CDLL(None, use_errno=True).statfs
_statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)


def name_lag(folder: str) -> float:
    """Return for how long this host may not see a name that another host has put in a folder.

    The result is in seconds. It is 0 on a local file system. On any other, such as NFS, Lustre,
    Ceph, SMB or FUSE, this host may cache names, attributes and the absence of names. An unknown
    type counts as one of these.

    Raises:
        OSError: The file system cannot be asked for its type.
    """
    return 0.0 if _number(folder) in _LOCAL_NUMBERS else _LAG


def is_shared_type(kind: str) -> bool:
    """Whether other hosts may use file systems of this type. An unknown type counts as shared.

    Args:
        kind: The type in the list of mounts, such as ``nfs4``.
    """
    return kind not in _LOCAL


def shared_type(folder: Path) -> str | None:
    """Return the type of a folder's file system if other hosts may use it.

    Returns:
        The type in the list of mounts; None if the file system is local, or not in the list.

    Raises:
        OSError: The file system cannot be asked for its type.
    """
    # Ask the file system first: that is one system call, and the list of mounts takes eight.
    if name_lag(str(folder)) == 0:
        return None
    mount = mount_of(folder)
    return mount.kind if mount is not None and is_shared_type(mount.kind) else None


def is_on_shared(real_path: str) -> bool:
    """Whether a path lies on a file system that other hosts may use.

    The list of mounts alone decides, because a call of the file system itself may hang. If the list
    cannot be read, the answer is False.

    Args:
        real_path: The path, without symbolic links.
    """
    mount = _mount_at(f"{real_path}/")
    return mount is not None and is_shared_type(mount.kind)


def _number(folder: str) -> int:
    found = (ctypes.c_ulong * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_ulong)))()
    while _statfs(os.fsencode(folder), found) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), folder)
    return found[0] & 0xFFFFFFFF


class Mount(NamedTuple):
    """A mounted file system.

    Attributes:
        folder: The folder where the file system is mounted, with a slash at the end.
        kind: The type, such as ``ext4`` or ``fuse.sshfs``.
        source: The disk; or the server and its folder.
        options: All mount options.
    """

    folder: str
    kind: str
    source: str
    options: tuple[str, ...]


def mounts() -> list[Mount]:
    """Return the mounted file systems; none if the system does not list them."""
    try:
        return _listed(Path("/proc/self/mountinfo").read_text())
    except OSError:
        return []


def mount_of(folder: Path) -> Mount | None:
    """Return the file system that holds a folder; None if it is unknown."""
    return _mount_at(f"{folder.resolve()}/")


def _mount_at(real_path: str) -> Mount | None:
    best: Mount | None = None
    for mount in mounts():
        is_inner = best is None or len(mount.folder) >= len(best.folder)
        if is_inner and real_path.startswith(mount.folder):
            best = mount
    return best


@lru_cache(1)
def _listed(mountinfo: str) -> list[Mount]:
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        # split(" ") and not split(): a source may be empty.
        fields, (kind, source, of_all) = left.split(), right.split(" ")[:3]
        folder = fields[4].replace("\\040", " ").rstrip("/") + "/"
        options = dict.fromkeys(f"{fields[5]},{of_all}".split(","))
        found.append(Mount(folder, kind, source.replace("\\043", "#"), tuple(options)))
    return found
