# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes that are reached over ssh: keys, the server's configuration, the first process of a namespace node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from .node import AUTHORIZED_KEYS, Specification
from .system import run, socket_inside

ROOT = Path(__file__).resolve().parents[2]
#: Environment of the programs on a node.
ENVIRONMENT: dict[str, str] = {
    "PYTHONPATH": str(ROOT),
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}


def make_keys(directory: Path, hosts: str) -> None:
    """Create the keys of the user and of all hosts, and ``known_hosts`` with this pattern of hosts."""
    for name in ("key", "hostkey"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(directory / name)])
    public = (directory / "hostkey.pub").read_text(encoding="ascii")
    (directory / "known_hosts").write_text(f"{hosts} {public}", encoding="ascii")


def prepare_server(directory: Path, scratch: Path, address: str) -> Path:
    """Put what a server at this address needs into ``scratch``, with the keys of ``directory``; its configuration."""
    (scratch / "hostkey").write_bytes((directory / "hostkey").read_bytes())
    (scratch / "hostkey").chmod(0o600)
    (scratch / "authorized_keys").write_bytes((directory / "key.pub").read_bytes())
    path = scratch / "sshd_config"
    lines = [
        f"ListenAddress {address}",
        f"HostKey {scratch}/hostkey",
        f"AuthorizedKeysFile {AUTHORIZED_KEYS}",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitUserRC no",
        "StrictModes no",
        "UsePAM no",
        "UseDNS no",
        "PidFile none",
        "MaxStartups 100",
        "MaxSessions 100",
        "Subsystem sftp internal-sftp",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="ascii")
    return path


def greets(namespace: str, address: str) -> bool:
    """Report whether a server at this address, seen from a network namespace, sends its greeting. Raises OSError."""
    with socket_inside(namespace, socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(2)
        client.connect((address, 22))
        return client.recv(64).startswith(b"SSH-")


def start_namespace_node(specification: Specification, network: str) -> subprocess.Popen[bytes]:
    """Start a node on the host's kernel, in a network namespace; ``console`` in its scratch gets its output."""
    scratch = Path(specification.scratch)
    specification.save(scratch / "specification.json")
    argv = [sys.executable, "-m", "tests.lab.node", str(scratch / "specification.json"), network]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(scratch / "console", "wb") as console:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=environment, start_new_session=True
        )
