"""What a file system can do, by its type: one table."""

from __future__ import annotations

import ctypes
import errno
import os

# The types, as `statfs` numbers them, of file systems whose names this host alone changes: ext2 to
# ext4, XFS, Btrfs, ZFS, F2FS, bcachefs, JFS, ReiserFS, NTFS, exFAT, FAT, tmpfs, ramfs, overlay,
# squashfs, and the disks of Windows below WSL 1.
_LOCAL = frozenset(
    {
        0xEF53,
        0x58465342,
        0x9123683E,
        0x2FC12FC1,
        0xF2F52010,
        0xCA451A4E,
        0x3153464A,
        0x52654973,
        0x7366746E,
        0x2011BAB0,
        0x4D44,
        0x01021994,
        0x858458F6,
        0x794C7630,
        0x73717368,
        0x53464846,
    }
)
# For so many seconds at most, a client keeps what it knows of names: `acdirmax` of NFS.
_LAG = 60.0
# The type is the first word of what `statfs` fills, which has fewer bytes than this.
_STATFS_BYTES = 256
_statfs = ctypes.CDLL(None, use_errno=True).statfs
_statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)


def name_lag(folder: str) -> float:
    """Return for how many seconds this host may not see a name that another host has put.

    It is 0 on a file system of this host. A client of any other, as of NFS, Lustre, Ceph, SMB or
    FUSE, may keep names, attributes, and that a name is absent. So may one of an unknown type.

    Raises:
        OSError: The folder cannot be looked at.
    """
    return 0.0 if file_system_type(folder) in _LOCAL else _LAG


def file_system_type(folder: str) -> int:
    """Return the type of the file system that holds a folder, as ``statfs`` numbers it.

    Raises:
        OSError: The folder cannot be looked at.
    """
    found = (ctypes.c_ulong * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_ulong)))()
    while _statfs(os.fsencode(folder), found) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), folder)
    return found[0] & 0xFFFFFFFF
