# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The images of the suite's pods, made from Debian's packages and two programs of Kubernetes, without a registry.

All have the same file system and differ in what they start. They are one archive in the form of ``docker save``
(https://github.com/moby/moby/blob/master/image/spec/v1.2.md), under the names that the suite lists.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Sequence

from tests.apiserver.tls import make_certificates
from tests.lab.stock_kernel import SUITES
from tests.lab.system import LabError, run

from .binaries import Binaries

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "e2e"
#: What the specs execute in their pods beside the programs of Kubernetes. Debian 12's busybox cannot supply wget: it
#: ends with a segmentation fault.
PACKAGES = (
    *("wget", "curl", "bind9-dnsutils", "netcat-openbsd", "iproute2", "iputils-ping", "iptables", "nftables"),
    *("conntrack", "openssl", "ca-certificates", "python3"),
)
#: What a container of an image starts, by the last part of the image's name.
ENTRYPOINTS: dict[str, Sequence[str]] = {
    "agnhost": ("/agnhost",),
    "busybox": (),
    "distroless-iptables": (),
    "pause": ("/agnhost", "pause"),
    "regression-issue-74839": ("/regression-issue-74839",),
}
COMMANDS: dict[str, Sequence[str]] = {"agnhost": ("pause",), "busybox": ("sh",)}
_PROGRAMS = ("agnhost", "regression-issue-74839")
_HOOK = 'rm -rf "$1"/usr/share/doc "$1"/usr/share/man "$1"/usr/share/locale "$1"/var/lib/apt/lists/*'


def image_names(binaries: Binaries) -> list[str]:
    """Return the names of the images that the suite can pull and that :data:`ENTRYPOINTS` has.

    Without the suite, they have names of this machine.
    """
    if not Path(binaries.path("e2e.test")).exists():
        return [f"localhost/{kind}:e2e" for kind in ENTRYPOINTS]
    listed = run([binaries.path("e2e.test"), "--list-images"]).split()
    names = sorted(name for name in listed if _kind(name) in ENTRYPOINTS)
    lacking = sorted(set(ENTRYPOINTS) - {_kind(name) for name in names})
    if lacking:
        raise LabError(f"e2e.test --list-images names no image {', '.join(lacking)}")
    return names


def _kind(name: str) -> str:
    return name.rsplit("/", 1)[-1].split(":")[0]


def image_of(kind: str, names: Sequence[str]) -> str:
    """Return the name of an image by its last part: "pause" is the image of the pods' sandboxes."""
    return next(name for name in names if _kind(name) == kind)


def pod_images(binaries: Binaries, names: Sequence[str], target: Path) -> None:
    """Write the archive of the images."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        programs = Path(scratch, "programs.tar")
        _write_programs(binaries, Path(scratch), programs)
        write_archive(target, [_packages(), programs], names)


def _packages() -> Path:
    """Return the layer with the packages; the first call makes it, which takes a minute."""
    recipe = (SUITES["12"], PACKAGES, _HOOK)
    layer = CACHE / f"packages-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]}.tar"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not layer.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                partial = Path(scratch, "packages.tar")
                make = ["unshare", "--mount", "mmdebstrap", "--quiet", "--variant=minbase"]
                run([*make, f"--include={','.join(PACKAGES)}", f"--customize-hook={_HOOK}", SUITES["12"], str(partial)])
                partial.rename(layer)
    return layer


def _write_programs(binaries: Binaries, scratch: Path, layer: Path) -> None:
    """Write the layer with Kubernetes' programs and the files that they expect."""
    made = make_certificates(scratch / "certificates")
    with tarfile.open(layer, "w") as archive:
        for name in _PROGRAMS:
            archive.add(binaries.path(name), name, filter=_plain)
        # agnhost porter serves TLS with these, agnhost netexec receives files in the directory.
        archive.add(made.certificate, "localhost.crt", filter=_plain)
        archive.add(made.key, "localhost.key", filter=_plain)
        uploads = tarfile.TarInfo("uploads")
        uploads.type, uploads.mode = tarfile.DIRTYPE, 0o777
        archive.addfile(uploads)
        link = tarfile.TarInfo("agnhost-2")
        link.type, link.linkname = tarfile.SYMTYPE, "agnhost"
        archive.addfile(link)
        # As busybox does, for which the specs are written: each failed request is reported at once.
        settings = b"tries = 1\n"
        wgetrc = tarfile.TarInfo("etc/wgetrc")
        wgetrc.size = len(settings)
        archive.addfile(wgetrc, io.BytesIO(settings))


def write_archive(target: Path, layers: Sequence[Path], names: Sequence[str]) -> None:
    """Write images that consist of these layers, tar files, under these names."""
    machine, manifest = os.uname().machine, []
    digests = [f"sha256:{_digest(layer)}" for layer in layers]
    with tarfile.open(target, "w") as archive:
        for layer in layers:
            archive.add(layer, layer.name, filter=_plain)
        for kind in sorted({_kind(name) for name in names}):
            config = {
                "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine),
                "os": "linux",
                "config": {
                    "Entrypoint": list(ENTRYPOINTS[kind]),
                    "Cmd": list(COMMANDS.get(kind, ())),
                    "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                    "WorkingDir": "/",
                },
                "rootfs": {"type": "layers", "diff_ids": digests},
            }
            text = json.dumps(config).encode()
            name = f"{hashlib.sha256(text).hexdigest()}.json"
            tags = [full for full in names if _kind(full) == kind]
            manifest.append({"Config": name, "RepoTags": tags, "Layers": [layer.name for layer in layers]})
            _add(archive, name, text)
        _add(archive, "manifest.json", json.dumps(manifest).encode())


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
