# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Images of Debian nodes with systemd, made from packages, and podman set up for them.

Ansible reaches the nodes as an ordinary user with sudo. No registry is needed. The root file system is kept below
.cache by a hash of its recipe; the image stays in podman's storage under a name with the same hash. KUBENODE_NODE_IMAGE
names an existing image of Debian 12 to use instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import time
from pathlib import Path
from typing import Sequence

from tests.lab.node import USER
from tests.lab.stock_kernel import SUITES

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "node-image"
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "kmod", "procps", "iproute2", "netbase", "ca-certificates", "curl"),
    *("python3", "python3-apt", "python3-yaml", "python3-prometheus-client"),
    *("iptables", "nftables", "ipset", "conntrack", "git", "firewalld", "sudo"),
)
SUITE = SUITES["12"]
#: On nodes of another release than this machine's, kernel tests run inside the container.
MORE_PACKAGES = {"12": (), "13": ("python3-pytest", "ipvsadm")}
# udev in a privileged container would give every container the same hardware address; firewalld is for the test that
# unmasks it; the others only cost time.
MASKED = (
    "firewalld.service",
    *("systemd-udevd.service", "systemd-udevd-kernel.socket", "systemd-udevd-control.socket"),
    *("systemd-udev-trigger.service", "systemd-logind.service", "getty.target", "console-getty.service"),
    *("proc-sys-fs-binfmt_misc.automount", "e2scrub_reap.service", "dpkg-db-backup.timer"),
    *("apt-daily.timer", "apt-daily-upgrade.timer"),
)
CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=9000:9000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def environment() -> dict[str, str]:
    """Return the environment for podman: a separate configuration, so that the machine's is not touched."""
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / "containers.conf"
    if not path.exists() or path.read_text() != CONTAINERS_CONF:
        path.write_text(CONTAINERS_CONF)
    return {**os.environ, "CONTAINERS_CONF": str(path)}


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run podman."""
    command = ["podman", *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}: {done.stderr.strip()}")
    return done


def stop(name: str, patience: int = 5) -> None:
    """Stop a container, by a signal that cannot be ignored after ``seconds``. Raises RuntimeError."""
    _repeat("stop", "--time", str(patience), name)


def remove(*names: str) -> None:
    """Kill and remove containers, if they exist. Raises RuntimeError."""
    _repeat("rm", "--force", "--ignore", "--time", "0", *names)


def _repeat(*arguments: str, seconds: float = 60.0) -> None:
    """Run podman until it succeeds, for a limited time. Raises RuntimeError after that.

    On a busy machine it may not see containers stop within its own time limit, or fail to kill one that has just
    stopped.
    """
    deadline = time.monotonic() + seconds
    while (done := podman(*arguments, check=False)).returncode:
        if time.monotonic() > deadline:
            raise RuntimeError(f"podman {' '.join(arguments)}: {done.stderr.strip()}")
        time.sleep(0.2)


def _recipe() -> str:
    masks = " ".join(f"/etc/systemd/system/{unit}" for unit in MASKED)
    # A script that mmdebstrap runs with the root. A shared machine-id would give all containers one identity.
    return f"""#!/bin/sh
set -eu
for unit in {masks}; do ln -sf /dev/null "$1$unit"; done
chroot "$1" useradd --create-home {USER}
cat >"$1/etc/sudoers.d/{USER}" <<.
{USER} ALL=(ALL) NOPASSWD: ALL
Defaults env_keep += "PYTHONPATH KUBENODE_COMPILED"
.
mkdir -p "$1/etc/systemd/network"
link="$1/etc/systemd/network/00-keep.link"
printf '%s\\n' '[Match]' 'OriginalName=*' '[Link]' NamePolicy=keep MACAddressPolicy=none >"$link"
mkdir -p "$1/var/lib/dbus"; ln -sf /etc/machine-id "$1/var/lib/dbus/machine-id"; : >"$1/etc/machine-id"
rm -rf "$1/usr/share/doc" "$1/usr/share/man" "$1/usr/share/locale" "$1"/var/lib/apt/lists/*
"""


def image(release: str = "12", more: Sequence[str] = ()) -> str:
    """Return the name of a release's image, with ``more`` packages in it.

    The first call builds it, which takes about a minute and a half.
    """
    given = os.environ.get("KUBENODE_NODE_IMAGE")
    if given and release == "12" and not more:
        return given
    suite, packages = SUITES[release], (*PACKAGES, *MORE_PACKAGES[release], *more)
    key = hashlib.sha256(repr((suite, packages, _recipe())).encode()).hexdigest()[:12]
    name = f"localhost/kubenode-proxy-node:{key}"
    if podman("image", "exists", name, check=False).returncode == 0:
        return name
    CACHE.mkdir(parents=True, exist_ok=True)
    # Several test runs may find it missing at the same time; one of them builds it.
    with open(CACHE / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if podman("image", "exists", name, check=False).returncode != 0:
            _make(suite, packages, key, name)
    return name


def _make(suite: str, packages: Sequence[str], key: str, name: str) -> None:
    tree = CACHE / f"root-{key}.tar"
    if not tree.exists():
        partial = CACHE / f"root-{key}.{os.getpid()}.tar"
        hook = CACHE / f"hook-{key}"
        hook.write_text(_recipe())
        hook.chmod(0o755)
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}"]
        command += [f"--customize-hook={hook}", suite, str(partial)]
        subprocess.run(command, check=True)
        partial.rename(tree)
    changes = ("--change", 'CMD ["/lib/systemd/systemd"]', "--change", "STOPSIGNAL SIGRTMIN+3")
    podman("import", *changes, str(tree), name)
