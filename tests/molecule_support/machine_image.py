# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The disk of a Debian 12 machine, built from packages and kept below .cache by a hash of its recipe.

Each machine writes to a separate copy-on-write file. Data of one scenario (keys, addresses, pods) is not on the disk: a
directory of the host is mounted for it. In user-mode Linux the kernel's command line names it, and the kernel's modules
are the host's; QEMU has mounted both already.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.systemd import image as containers

CACHE = containers.CACHE.parent / "machine-image"
PACKAGES = (*containers.PACKAGES, "openssh-server", "ipvsadm", "udev")
MASKED = tuple(unit for unit in containers.MASKED if "udev" not in unit and "getty" not in unit)
SIZE = "1200M"
LEGACY = ("iptables", "ip6tables")

FSTAB = """\
/dev/root    /            auto   rw,noatime 0 0
lib-modules  /lib/modules hostfs /usr/lib/uml/modules 0 0
"""
# Otherwise modules-load.d is read before the host's modules are mounted.
AFTER_MOUNT = "[Unit]\nRequiresMountsFor=/usr/lib/modules\n"
SSHD = """\
AuthorizedKeysFile /opt/lab/authorized_keys
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
MaxStartups 100
MaxSessions 100
"""
_FIND = 'sed "s/.*lab=//; s/ .*//" /proc/cmdline'
MOUNT = f"""\
ExecStartPre=/bin/sh -c 'mkdir -p /opt/lab; mountpoint -q /opt/lab || mount -t hostfs -o "$$({_FIND})" lab /opt/lab'
"""
NETWORK_UNIT = """\
[Unit]
Description=Network of the laboratory
DefaultDependencies=no
After=systemd-remount-fs.service local-fs.target systemd-modules-load.service
Before=network-pre.target network.target systemd-sysctl.service ssh.service
Wants=network.target
[Service]
Type=oneshot
RemainAfterExit=yes
Environment=PYTHONPATH=/opt/lab PYTHONDONTWRITEBYTECODE=1
ExecStart=/usr/bin/python3 -m tests.molecule_support.inside network
[Install]
WantedBy=multi-user.target
"""
PODS_UNIT = """\
[Unit]
Description=Pods of the laboratory
After=network.target
[Service]
Environment=PYTHONPATH=/opt/lab PYTHONDONTWRITEBYTECODE=1
ExecStart=/usr/bin/python3 -m tests.molecule_support.inside pods
Restart=on-failure
[Install]
WantedBy=multi-user.target
"""


def _furnish(root: Path) -> None:
    """Turn the unpacked packages into a bootable machine."""
    units = root / "etc/systemd/system"
    wanted = units / "multi-user.target.wants"
    files = {
        "etc/fstab": FSTAB,
        "etc/modules-load.d/lab.conf": "ipv6\nveth\n",
        "etc/systemd/system/systemd-modules-load.service.d/lab.conf": AFTER_MOUNT,
        "etc/systemd/system/lab-network.service": NETWORK_UNIT.replace("ExecStart=", MOUNT + "ExecStart="),
        "etc/systemd/system/lab-pods.service": PODS_UNIT,
        "etc/ssh/sshd_config.d/lab.conf": SSHD,
        "etc/machine-id": "",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    wanted.mkdir(exist_ok=True)
    for unit in ("lab-network.service", "lab-pods.service"):
        (wanted / unit).symlink_to(f"/etc/systemd/system/{unit}")
    for unit in MASKED:
        link = units / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    # dbus creates an identity at installation that all machines would share.
    identity = root / "var/lib/dbus/machine-id"
    identity.parent.mkdir(parents=True, exist_ok=True)
    identity.unlink(missing_ok=True)
    identity.symlink_to("/etc/machine-id")
    # Debian's guest kernel has no NF_TABLES_IPV4.
    for family in LEGACY:
        for suffix in ("", "-save", "-restore"):
            link = root / "etc/alternatives" / (family + suffix)
            link.unlink(missing_ok=True)
            link.symlink_to(f"/usr/sbin/{family}-legacy{suffix}")
    shadow = root / "etc/shadow"
    # sshd refuses an account whose password field begins with an exclamation mark.
    lines = [line.split(":") for line in shadow.read_text(encoding="ascii").splitlines()]
    shadow.write_text("".join(":".join([f[0], "*", *f[2:]]) + "\n" for f in lines), encoding="ascii")
    for name in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt/lists"):
        shutil.rmtree(root / name, ignore_errors=True)


def disk() -> Path:
    """Return the file of the disk, building it first if it is missing, which takes about a minute and a half."""
    files = (FSTAB, AFTER_MOUNT, SSHD, MOUNT, NETWORK_UNIT, PODS_UNIT)
    recipe = (containers.SUITE, PACKAGES, MASKED, SIZE, LEGACY, *files)
    key = hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
    path = CACHE / f"disk-{key}.ext4"
    if path.exists():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        root, partial = Path(scratch) / "root", Path(scratch) / "disk"
        # In a mount namespace, so that its mounts in the root are never visible or left behind outside.
        command = ["unshare", "--mount", "mmdebstrap", "--quiet", "--variant=minbase", "--format=directory"]
        subprocess.run([*command, f"--include={','.join(PACKAGES)}", containers.SUITE, str(root)], check=True)
        _furnish(root)
        make = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-d", str(root), str(partial), SIZE]
        environment = {**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
        subprocess.run(make, check=True, env=environment)
        partial.rename(path)
    return path
