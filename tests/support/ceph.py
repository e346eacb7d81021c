"""A Ceph cluster of one monitor and one OSD, whose objects are in memory, with its S3 gateway.

``python tests/support/ceph.py FOLDER GATEWAY_PORT MONITOR_PORT ACCESS_KEY SECRET_KEY`` runs until
it is killed, and all its daemons with it. On Debian and Ubuntu, ``apt-get install radosgw ceph-mon
ceph-osd`` installs what it needs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

PROGRAMS = (
    "ceph",
    "ceph-authtool",
    "ceph-mon",
    "ceph-osd",
    "monmaptool",
    "radosgw",
    "radosgw-admin",
)
_SECONDS = 60.0
_SETTINGS = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{monitor}
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
log file = {folder}/$name.log
crash dir = {folder}
mon data = {folder}/mon
mon data avail crit = 0
mon data avail warn = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon pg warn min per osd = 0
mon max pg per osd = 1000
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 8589934592
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
ms bind msgr1 = false
ms bind port min = 30000
ms bind port max = 32700
public addr = 127.0.0.1
cluster addr = 127.0.0.1
rgw frontends = beast endpoint=127.0.0.1:{gateway}
rgw data = {folder}/rgw
rgw enable gc threads = false
"""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class _Cluster:
    def __init__(self, folder: Path) -> None:
        self._settings = str(folder / "ceph.conf")
        self.daemons: list[subprocess.Popen[bytes]] = []

    def run(self, program: str, *arguments: str) -> None:
        command = [program, "--conf", self._settings, *arguments]
        subprocess.run(command, check=True, preexec_fn=_die_with_parent, timeout=_SECONDS)

    def start(self, program: str, *arguments: str) -> None:
        command = [program, "--conf", self._settings, "--foreground", *arguments]
        self.daemons.append(subprocess.Popen(command, preexec_fn=_die_with_parent))


def main() -> None:
    folder, gateway, monitor, access, secret = sys.argv[1:]
    place, fsid = Path(folder), str(uuid.uuid4())
    for name in ("mon", "osd", "rgw"):
        (place / name).mkdir()
    text = _SETTINGS.format(fsid=fsid, folder=folder, gateway=gateway, monitor=monitor)
    (place / "ceph.conf").write_text(text)
    cluster, monitors = _Cluster(place), str(place / "monmap")
    address = f"[v2:127.0.0.1:{monitor}]"
    cluster.run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monitors)
    keyring = str(place / "keyring")
    (place / "keyring").touch()
    for name in ("mon.", "client.admin", "osd.0"):
        parts = ("mon", "osd", "mgr", "mds")
        caps = [word for part in parts for word in ("--cap", part, "allow *")]
        cluster.run("ceph-authtool", keyring, "--gen-key", "--name", name, *caps)
    cluster.run("ceph-mon", "--mkfs", "--id", "a", "--monmap", monitors, "--keyring", keyring)
    cluster.start("ceph-mon", "--id", "a")
    ident = str(uuid.uuid4())
    cluster.run("ceph", "osd", "new", ident)
    cluster.run("ceph-osd", "--mkfs", "--id", "0", "--osd-uuid", ident)
    cluster.start("ceph-osd", "--id", "0")
    keys = ["--access-key", access, "--secret-key", secret]
    cluster.run("radosgw-admin", "user", "create", "--uid", "tests", "--display-name", "t", *keys)
    cluster.start("radosgw", "--name", "client.admin")
    while all(daemon.poll() is None for daemon in cluster.daemons):
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    main()
