# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Debian's own kernel for QEMU, unpacked from its package, not installed.

It is kept below .cache by a hash of its recipe, with a small first root file system that loads the drivers of emulated
devices and hands over to the root that the guest is given.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Iterator, List, NamedTuple, Sequence, Tuple

from tests.lab.system import LabError, run

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "stock-kernel"
PACKAGE, SHELL = "linux-image-amd64", "busybox-static"
DRIVERS = ("virtio_pci", "virtio_net", "virtio_blk", "virtio_console", "9pnet_virtio", "9p", "overlay", "ext4")
# Of the 400 MB of modules, those of networks, of the file systems above, and what they depend on.
UNPACKED = ("boot/vmlinuz-*", *(f"lib/modules/*/{place}" for place in (
    "modules.*", "kernel/net", "kernel/lib", "kernel/crypto", "kernel/arch/x86/crypto", "kernel/drivers/virtio",
    "kernel/drivers/net/*.ko", "kernel/drivers/block/virtio_blk.ko", "kernel/drivers/char/virtio_console.ko",
    "kernel/fs/9p", "kernel/fs/netfs", "kernel/fs/fscache", "kernel/fs/overlayfs", "kernel/fs/ext4", "kernel/fs/jbd2",
    "kernel/fs/mbcache.ko",
)))  # fmt: skip
# The kernel's command line says what the root is (root.type, root.options, root.source), which shares of the host are
# mounted where in it (share.TAG), and after two dashes the first program; variables on it are that one's environment.
FIRST_PROGRAM = """\
#!/bin/busybox sh
bb=/bin/busybox
$bb mount -t proc proc /proc
$bb mount -t devtmpfs dev /dev
for module in /modules/*; do $bb insmod "$module" || exit 1; done
words=$($bb cat /proc/cmdline)
for word in $words; do
    value=${word#*=}
    case $word in
    root.type=*) type=$value ;;
    root.options=*) options=$value ;;
    root.source=*) source=$value ;;
    esac
done
$bb mount -t "$type" -o "$options" "$source" /newroot || exit 1
for word in $words; do
    case $word in
    share.*=*)
        tag=${word%%=*} path=/newroot${word#*=}
        $bb mkdir -p "$path"
        $bb mount -t 9p -o trans=virtio,version=9p2000.L,cache=none "${tag#share.}" "$path" || exit 1
        ;;
    esac
done
$bb umount /dev
$bb umount /proc
exec $bb switch_root /newroot "$@"
"""


class StockKernel(NamedTuple):
    """Where the kernel's files are: its release, the image, ``lib/modules`` and the first root file system."""

    release: str
    image: Path
    modules: Path
    first_root: Path


def stock_kernel() -> StockKernel:
    """The kernel of Debian's ``linux-image-amd64``; the first call brings it, in about ten seconds.

    Raises LabError where it cannot be had.
    """
    recipe = (PACKAGE, DRIVERS, UNPACKED, FIRST_PROGRAM)
    cache = CACHE / hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = sorted(cache.glob("*/first-root"))
        if not found:
            found = [_bring(cache)]
        place = found[-1].parent
        return StockKernel(place.name, place / f"boot/vmlinuz-{place.name}", place / "lib/modules", found[-1])


def _bring(cache: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=cache) as name:
        scratch = Path(name)
        depends = re.search(r"Depends: linux-image-(\S+)", _apt(["apt-cache", "depends", PACKAGE], scratch))
        if depends is None:
            raise LabError(f"{PACKAGE}: depends on no kernel")
        release = depends.group(1)
        _apt(["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", f"linux-image-{release}", SHELL], scratch)
        unpacked = scratch / "unpacked"
        unpacked.mkdir()
        patterns = [f"./{pattern}" for pattern in UNPACKED]
        _unpack(next(scratch.glob("linux-image-*.deb")), unpacked, patterns)
        _unpack(next(scratch.glob("busybox-static_*.deb")), unpacked, ["./bin/busybox"])
        run(["depmod", "-b", str(unpacked), release])
        (unpacked / "first-root").write_bytes(_first_root(unpacked, release))
        unpacked.rename(cache / release)
        return cache / release / "first-root"


def _apt(argv: Sequence[str], directory: Path) -> str:
    """Run a command of apt; where it finds no packages, as without their lists or with old ones, bring the lists."""
    for _attempt in (1, 2):
        done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        run(["apt-get", "update", "-qq"])
    raise LabError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()}")


def _unpack(package: Path, directory: Path, patterns: Sequence[str]) -> None:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as content:
        argv = ["tar", "-x", "-C", str(directory), "--no-same-owner", "--wildcards", *patterns]
        done = subprocess.run(argv, stdin=content.stdout, capture_output=True, text=True, check=False)
    if done.returncode or content.returncode:
        raise LabError(f"unpacking {package.name}: {done.stderr.strip()}")


def _modules(unpacked: Path, release: str) -> List[Path]:
    """The files of the drivers, in the order in which they can be loaded."""
    order: List[Path] = []
    for driver in DRIVERS:
        listed = run(["modprobe", "-S", release, "-d", str(unpacked), "--show-depends", driver])
        for line in listed.splitlines():
            words = line.split()
            path = Path(words[1]) if words[0] == "insmod" else None
            if path and path not in order:
                order.append(path)
    return order


def _first_root(unpacked: Path, release: str) -> bytes:
    """A cpio archive (kernel: Documentation/driver-api/early-userspace/buffer-format.rst)."""

    def entries() -> Iterator[Tuple[str, int, bytes]]:
        for directory in ("bin", "dev", "proc", "newroot", "modules"):
            yield directory, stat.S_IFDIR | 0o755, b""
        yield "bin/busybox", stat.S_IFREG | 0o755, (unpacked / "bin/busybox").read_bytes()
        yield "init", stat.S_IFREG | 0o755, FIRST_PROGRAM.encode()
        for number, path in enumerate(_modules(unpacked, release)):
            yield f"modules/{number:02d}-{path.name}", stat.S_IFREG | 0o644, path.read_bytes()
        yield "TRAILER!!!", 0, b""

    archive = b""
    for number, (name, mode, content) in enumerate(entries()):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        archive += header + b"\0" * (-len(header) % 4) + content + b"\0" * (-len(content) % 4)
    return archive
