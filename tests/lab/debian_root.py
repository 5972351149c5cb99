# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Root file systems of emulated guests that are another release of Debian than this machine, made from packages.

Each is a directory below .cache, named by a hash of its recipe. Nothing is written to it: a guest has it under an
overlay in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
from pathlib import Path

from tests.lab.stock_kernel import SUITES
from tests.lab.system import run

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "debian-root"
# Packages of the programs that the tests execute on a node, and of the tests themselves.
PACKAGES = (
    *("iproute2", "iptables", "nftables", "ipset", "ipvsadm", "conntrack", "kmod", "procps", "hostname", "curl"),
    *("python3", "python3-yaml", "python3-prometheus-client", "python3-pytest", "netbase", "openssl"),
)
#: Where a guest sees the project, its specification and the kernel's modules before it has its own root.
PROJECT, SCRATCH, MODULES = "/host/project", "/host/scratch", "/usr/lib/modules"
_HOOK = (
    f'mkdir -p "$1{PROJECT}" "$1{SCRATCH}" "$1{MODULES}"; '
    'rm -rf "$1"/usr/share/doc "$1"/usr/share/man "$1"/usr/share/locale'
)


def debian_root(release: str) -> Path:
    """Return the directory with that release of Debian; the first call makes it, which takes about a minute.

    Raises LabError where it cannot be made.
    """
    suite = SUITES[release]
    place = CACHE / hashlib.sha256(repr((suite, PACKAGES, _HOOK)).encode()).hexdigest()[:12]
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                made = Path(scratch, "root")
                make = ["unshare", "--mount", "mmdebstrap", "--quiet", "--variant=minbase", "--format=directory"]
                run([*make, f"--include={','.join(PACKAGES)}", f"--customize-hook={_HOOK}", suite, str(made)])
                made.rename(place)
    return place
