"""A file system of our own, which does what network file systems do: it passes all on to a folder.

It gives all files to one user if it is told to, and so do EFS access points, exports with
``all_squash`` and CIFS. It has no hard links if it is told so, as exFAT has none. It tells another
inode at each look, as clients of FUSE may. It answers what
``fail`` names by errors. It speaks the protocol of FUSE itself, so nothing has to be installed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.support.mounts import needs_root

_HEADER = struct.Struct("<IIQQIIIHH")
_ATTR = struct.Struct("<6Q10I")
_SILENT = (2, 42)  # FORGET, BATCH_FORGET
_INTERRUPT, _INIT = 36, 26
_libc = ctypes.CDLL(None, use_errno=True)


class Volume:
    """The mounted file system.

    Attributes:
        path: Where it is mounted.
        below: The folder that it passes all on to.
    """

    def __init__(self, path: Path, below: Path, faults: Path) -> None:
        self.path = path
        self.below = below
        self._faults = faults

    def fail(self, name: str, code: int) -> None:
        """Have each look at files and folders of a name fail."""
        self._faults.write_text(json.dumps({**self._now(), name: code}))

    def heal(self) -> None:
        """Have nothing fail any more."""
        self._faults.write_text("{}")

    def _now(self) -> dict[str, int]:
        return dict(json.loads(self._faults.read_text()))


@contextmanager
def volume(
    folder: Path,
    *,
    owner: int | None = None,
    modes: bool = True,
    links: bool = True,
    inodes: bool = True,
) -> Iterator[Volume]:
    """Mount one in a folder, or skip the test.

    Args:
        folder: The folder, which is made; beside it is the one below.
        owner: The user whom all files seem to be of; by default their own.
        modes: Whether files have the modes that they are given; else all may do all.
        links: Whether there are hard links.
        inodes: Whether a file keeps its inode.
    """
    needs_root()
    below, faults = folder.with_name(f"{folder.name}.below"), folder.with_name(f"{folder.name}.bad")
    folder.mkdir()
    below.mkdir()
    faults.write_text("{}")
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as e:
        pytest.skip(f"needs /dev/fuse: {e}")
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if _libc.mount(b"volume", os.fsencode(folder), b"fuse.volume", 6, options.encode()):
        os.close(device)
        pytest.skip(f"cannot mount here: {os.strerror(ctypes.get_errno())}")
    pid = os.fork()
    if not pid:
        try:
            _Server(device, below, faults, owner, modes, links, inodes).serve()
        finally:
            os._exit(0)
    os.close(device)
    try:
        yield Volume(folder, below, faults)
    finally:
        _libc.umount2(os.fsencode(folder), 2)
        os.waitpid(pid, 0)


class _Server:
    """Answers the kernel, one request after the other."""

    def __init__(
        self,
        device: int,
        below: Path,
        faults: Path,
        owner: int | None,
        modes: bool,
        links: bool,
        inodes: bool,
    ) -> None:
        self._device = device
        self._faults = faults
        self._owner = owner
        self._modes = modes
        self._links = links
        self._numbers = None if inodes else count(1 << 20)
        self._paths: dict[int, list[str]] = {1: [str(below)]}
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            1: lambda node, raw: self._entry(self._child(node, raw)),
            3: self._getattr,
            4: self._setattr,
            5: lambda node, _: os.fsencode(os.readlink(self._path(node))),
            6: self._symlink,
            9: self._mkdir,
            10: lambda node, raw: _did(os.unlink, self._child(node, raw)),
            11: lambda node, raw: _did(os.rmdir, self._child(node, raw)),
            12: lambda node, raw: self._rename(node, raw, 8),
            13: self._link,
            14: lambda node, raw: _opened(self._open(node, struct.unpack_from("<I", raw)[0])),
            15: self._read,
            16: self._write,
            17: self._statfs,
            18: lambda _, raw: _did(os.close, *struct.unpack_from("<Q", raw)),
            20: lambda _, raw: _did(os.fsync, *struct.unpack_from("<Q", raw)),
            25: lambda _, __: b"",
            _INIT: lambda _, __: struct.pack(
                "<IIIIHHIIHHI28x", 7, 31, 1 << 17, 0, 16, 12, 1 << 17, 1, 32, 0, 0
            ),
            27: lambda _, __: _opened(0),
            38: lambda _, __: b"",
            28: self._readdir,
            29: lambda _, __: b"",
            30: lambda _, __: b"",
            35: self._create,
            45: lambda node, raw: self._rename(node, raw, 16),
        }

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, (1 << 17) + 4096)
            except OSError as e:
                if e.errno == errno.ENODEV:
                    return
                continue
            _, opcode, unique, node, *_ = _HEADER.unpack_from(request)
            if opcode in _SILENT or opcode == _INTERRUPT:
                continue
            error, reply = 0, b""
            try:
                reply = self._answers[opcode](node, request[_HEADER.size :])
            except KeyError:
                error = -errno.ENOSYS
            except OSError as e:
                error = -(e.errno or 0)
            with_header = struct.pack("<IiQ", 16 + len(reply), error, unique) + reply
            try:
                os.write(self._device, with_header)
            except OSError:
                continue  # it was interrupted, or is unmounted

    # --- names ---

    def _path(self, node: int) -> str:
        """Return a path that a node has now."""
        for path in self._paths[node]:
            if node == 1 or (os.path.lexists(path) and os.lstat(path).st_ino == node):
                self._check(path)
                return path
        raise OSError(errno.ESTALE, "gone")

    def _child(self, node: int, raw: bytes, *, at: int = 0) -> str:
        name = os.fsdecode(raw[at:].split(b"\0")[0])
        path = f"{self._paths[node][0]}/{name}" if node == 1 else f"{self._path(node)}/{name}"
        self._check(path)
        return path

    def _check(self, path: str) -> None:
        code = json.loads(self._faults.read_text() or "{}").get(os.path.basename(path))
        if code:
            raise OSError(code, os.strerror(code))

    # --- what a node is ---

    def _inode(self, info: os.stat_result) -> int:
        return info.st_ino if self._numbers is None else next(self._numbers)

    def _attr(self, info: os.stat_result) -> bytes:
        mode = info.st_mode if self._modes else stat.S_IFMT(info.st_mode) | 0o777
        times = [int(t // 10**9) for t in (info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns)]
        parts = [int(t % 10**9) for t in (info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns)]
        uid = info.st_uid if self._owner is None else self._owner
        gid = info.st_gid if self._owner is None else self._owner
        blocks = (info.st_size, info.st_blocks)
        return _ATTR.pack(
            self._inode(info), *blocks, *times, *parts, mode, info.st_nlink, uid, gid, 0, 4096, 0
        )

    def _entry(self, path: str) -> bytes:
        info = os.lstat(path)
        known = self._paths.setdefault(info.st_ino, [])
        if path not in known:
            known.insert(0, path)
        return struct.pack("<4Q2I", info.st_ino, 0, 0, 0, 0, 0) + self._attr(info)

    def _getattr(self, node: int, raw: bytes) -> bytes:
        flags, _, fh = struct.unpack_from("<IIQ", raw)
        info = os.fstat(fh) if flags & 1 else os.lstat(self._path(node))
        return struct.pack("<QII", 0, 0, 0) + self._attr(info)

    def _setattr(self, node: int, raw: bytes) -> bytes:
        valid, _, fh, size, *_ = struct.unpack_from("<IIQQ", raw)
        mode, _, uid, gid = struct.unpack_from("<IIII", raw, 68)
        path = f"/proc/self/fd/{fh}" if valid & 64 else self._path(node)
        if valid & 1:
            os.chmod(path, mode)
        if valid & 6 and self._owner is None:
            os.chown(path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(path, size)
        if valid & 48:
            os.utime(path)
        return struct.pack("<QII", 0, 0, 0) + self._attr(os.stat(path))

    def _statfs(self, node: int, _: bytes) -> bytes:
        disk = os.statvfs(self._paths[1][0])
        counts = (disk.f_blocks, disk.f_bfree, disk.f_bavail, disk.f_files, disk.f_ffree)
        return struct.pack("<5Q4I24x", *counts, disk.f_bsize, 255, disk.f_frsize, 0)

    # --- files and folders ---

    def _open(self, node: int, flags: int) -> int:
        return os.open(self._path(node), flags & ~(os.O_NOFOLLOW | os.O_DIRECT | os.O_EXCL))

    def _create(self, node: int, raw: bytes) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<IIII", raw)
        path = self._child(node, raw, at=16)
        fd = os.open(path, (flags & ~os.O_DIRECT) | os.O_CREAT, mode)
        os.fchmod(fd, mode & 0o7777)
        return self._entry(path) + _opened(fd)

    def _mkdir(self, node: int, raw: bytes) -> bytes:
        path = self._child(node, raw, at=8)
        os.mkdir(path)
        os.chmod(path, struct.unpack_from("<I", raw)[0] & 0o7777)
        return self._entry(path)

    def _symlink(self, node: int, raw: bytes) -> bytes:
        name, target = raw.split(b"\0")[:2]
        path = self._child(node, name)
        os.symlink(os.fsdecode(target), path)
        return self._entry(path)

    def _link(self, node: int, raw: bytes) -> bytes:
        if not self._links:
            raise OSError(errno.EPERM, "no links")
        path = self._child(node, raw, at=8)
        os.link(self._path(struct.unpack_from("<Q", raw)[0]), path)
        return self._entry(path)

    def _rename(self, node: int, raw: bytes, at: int) -> bytes:
        old, new = raw[at:].split(b"\0")[:2]
        os.rename(self._child(node, old), self._child(struct.unpack_from("<Q", raw)[0], new))
        return b""

    def _read(self, _: int, raw: bytes) -> bytes:
        fh, offset, size = struct.unpack_from("<QQI", raw)
        return os.pread(fh, size, offset)

    def _write(self, _: int, raw: bytes) -> bytes:
        fh, offset, size = struct.unpack_from("<QQI", raw)
        return struct.pack("<II", os.pwrite(fh, raw[40 : 40 + size], offset), 0)

    def _readdir(self, node: int, raw: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", raw)
        listing, names = b"", sorted(os.listdir(self._path(node)))
        for number, name in enumerate(names[offset:], offset + 1):
            raw_name = os.fsencode(name)
            info = os.lstat(f"{self._path(node)}/{name}")
            each = struct.pack(
                "<QQII", self._inode(info), number, len(raw_name), info.st_mode >> 12
            )
            each += raw_name.ljust(-(-len(raw_name) // 8) * 8, b"\0")
            if len(listing) + len(each) > size:
                break
            listing += each
        return listing


def _opened(fh: int) -> bytes:
    return struct.pack("<QII", fh, 0, 0)


def _did(do: Callable[..., object], *arguments: object) -> bytes:
    do(*arguments)
    return b""
