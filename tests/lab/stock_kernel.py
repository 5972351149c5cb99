# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Debian's own kernels for QEMU, unpacked from their packages, not installed.

Each is kept below .cache by a hash of its recipe, with a small first root file system that loads the drivers of
emulated devices and hands over to the root that the guest is given.
"""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Iterator, NamedTuple

from tests.lab.system import LabError, run

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "stock-kernel"
#: Suites of Debian's archive by release.
SUITES = {"12": "bookworm", "13": "trixie"}
PACKAGES = ("linux-image-amd64", "busybox-static")
DRIVERS = ("virtio_pci", "virtio_net", "virtio_blk", "virtio_console", "9pnet_virtio", "9p", "overlay", "ext4")
# Of the 400 MB of modules, those of networks and of the file systems above, and their dependencies.
KEPT = (
    "modules.*", "kernel/net", "kernel/lib", "kernel/crypto", "kernel/arch/x86/crypto", "kernel/drivers/virtio",
    "kernel/drivers/net/*.ko*", "kernel/drivers/block/virtio_blk.ko*", "kernel/drivers/char/virtio_console.ko*",
    "kernel/fs/9p", "kernel/fs/netfs", "kernel/fs/fscache", "kernel/fs/overlayfs", "kernel/fs/ext4", "kernel/fs/jbd2",
    "kernel/fs/mbcache.ko*",
)  # fmt: skip
# The kernel's command line names the root (root.type, root.options, root.source), the directories of the host that are
# mounted in it (share.TAG: changing ones; view.TAG: read-only ones that do not change meanwhile), and after two dashes
# the first program, whose environment are the variables on the command line.
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
    share.*=*) options=cache=none ;;
    view.*=*) options=ro,cache=loose,msize=512000 ;;
    *) continue ;;
    esac
    tag=${word%%=*} path=/newroot${word#*=}
    $bb mkdir -p "$path"
    $bb mount -t 9p -o "trans=virtio,version=9p2000.L,$options" "${tag#*.}" "$path" || exit 1
done
$bb umount /dev
$bb umount /proc
exec $bb switch_root /newroot "$@"
"""


class StockKernel(NamedTuple):
    """A kernel's release and files: the image, ``lib/modules`` and the first root file system."""

    release: str
    image: Path
    modules: Path
    first_root: Path


def stock_kernel(release: str = "12") -> StockKernel:
    """Return the kernel of that release of Debian; the first call fetches it, which takes about 20 seconds.

    Raises LabError where it cannot be fetched.
    """
    suite = SUITES[release]
    recipe = (suite, PACKAGES, DRIVERS, KEPT, FIRST_PROGRAM)
    cache = CACHE / hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = sorted(cache.glob("*/first-root"))
        if not found:
            found = [_fetch(cache, suite)]
        place = found[-1].parent
        return StockKernel(place.name, place / "vmlinuz", place / "lib/modules", found[-1])


def _fetch(cache: Path, suite: str) -> Path:
    """Unpack the packages of a suite, which need not be this machine's, and keep what a guest needs."""
    with tempfile.TemporaryDirectory(dir=cache) as name:
        unpacked, kept = Path(name, "unpacked"), Path(name, "kept")
        make = ["unshare", "--mount", "mmdebstrap", "--quiet", "--variant=extract", "--format=directory"]
        run([*make, f"--include={','.join(PACKAGES)}", suite, str(unpacked)])
        # Debian 13 has merged /usr; packages unpacked without base-files have no link to it.
        places = [place for place in (unpacked / "lib/modules", unpacked / "usr/lib/modules") if place.is_dir()]
        images = list((unpacked / "boot").glob("vmlinuz-*"))
        shells = [path for path in (unpacked / "bin/busybox", unpacked / "usr/bin/busybox") if path.is_file()]
        if len(images) != 1 or not places or not shells:
            raise LabError(f"{suite}: the packages {', '.join(PACKAGES)} have no kernel, or several")
        release = images[0].name[len("vmlinuz-") :]
        source, target = places[0] / release, kept / "lib/modules" / release
        for path in sorted({path for pattern in KEPT for path in source.glob(pattern)}):
            destination = target / path.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            path.rename(destination)
        shutil.copy(images[0], kept / "vmlinuz")
        shutil.copy(shells[0], kept / "busybox")
        run(["depmod", "-b", str(kept), release])
        (kept / "first-root").write_bytes(_first_root(kept, release))
        kept.rename(cache / release)
        return cache / release / "first-root"


def _modules(unpacked: Path, release: str) -> list[Path]:
    """Return the files of the drivers, in the order in which they can be loaded."""
    order: list[Path] = []
    for driver in DRIVERS:
        listed = run(["modprobe", "-S", release, "-d", str(unpacked), "--show-depends", driver])
        for line in listed.splitlines():
            words = line.split()
            path = Path(words[1]) if words[0] == "insmod" else None
            if path and path not in order:
                order.append(path)
    return order


def _first_root(unpacked: Path, release: str) -> bytes:
    """Return a cpio archive (kernel: Documentation/driver-api/early-userspace/buffer-format.rst)."""

    def entries() -> Iterator[tuple[str, int, bytes]]:
        for directory in ("bin", "dev", "proc", "newroot", "modules"):
            yield directory, stat.S_IFDIR | 0o755, b""
        yield "bin/busybox", stat.S_IFREG | 0o755, (unpacked / "busybox").read_bytes()
        yield "init", stat.S_IFREG | 0o755, FIRST_PROGRAM.encode()
        for number, path in enumerate(_modules(unpacked, release)):
            content = path.read_bytes()
            if path.suffix == ".xz":
                content = lzma.decompress(content)
            yield f"modules/{number:02d}-{path.name}", stat.S_IFREG | 0o644, content
        yield "TRAILER!!!", 0, b""

    archive = b""
    for number, (name, mode, content) in enumerate(entries()):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        archive += header + b"\0" * (-len(header) % 4) + content + b"\0" * (-len(content) % 4)
    return archive
