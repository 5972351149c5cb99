# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requirements of a node that uses ansible-pull: its own Ansible, this collection, and a git repository."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.libraries import (
    Target,
    cache_name,
    install,
    pack_directory,
    pip_arguments,
)
from tests.waiting import wait_for

from .cluster import BRIDGE
from .node import ROOT, Node, collection

CACHE = ROOT / ".cache" / "libraries"
# The version with the fewest dependencies that runs on the Python of the nodes.
ANSIBLE = ("ansible-core>=2.16,<2.20",)
_PROGRAM = """\
#!/usr/bin/python3
import sys
sys.path.insert(0, "/opt/ansible")
from ansible.cli.{module} import main
sys.exit(main())
"""


def install_ansible(node: Node) -> None:
    """Install Ansible in /opt/ansible, link its programs to /usr/bin, and install the collection in a default path."""
    version = node.output("python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    target = Target(version, os.uname().machine)
    archive = CACHE / cache_name(target, ANSIBLE, ())
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            install(sys.executable, pip_arguments(target, ANSIBLE, place))
            partial = archive.with_suffix(f".{os.getpid()}")
            partial.write_bytes(pack_directory(place))
            partial.rename(archive)
    node.copy(archive, "/srv/ansible.tar.gz")
    node.run("mkdir", "-p", "/opt/ansible", "/usr/share/ansible/collections")
    node.run("tar", "-xzf", "/srv/ansible.tar.gz", "-C", "/opt/ansible")
    for name, module in {"ansible": "adhoc", "ansible-playbook": "playbook", "ansible-pull": "pull"}.items():
        node.write(f"/usr/bin/{name}", _PROGRAM.format(module=module))
        node.run("chmod", "755", f"/usr/bin/{name}")
    packed = subprocess.run(
        ["tar", "-C", str(collection()), "-cz", "ansible_collections"], check=True, capture_output=True
    ).stdout
    path = node.scratch / "collection.tar.gz"
    path.write_bytes(packed)
    node.copy(path, "/srv/collection.tar.gz")
    node.run("tar", "-xzf", "/srv/collection.tar.gz", "-C", "/usr/share/ansible/collections", "--no-same-owner")


class Repository:
    """A git repository on this machine that nodes fetch from ``url``."""

    def __init__(self, scratch: Path) -> None:
        self._work = scratch / "work"
        self._bare = scratch / "served" / "network.git"
        self._bare.parent.mkdir(parents=True)
        _git("init", "--quiet", "--initial-branch=main", str(self._work))
        _git("init", "--quiet", "--bare", "--initial-branch=main", str(self._bare))
        with socket.socket() as probe:
            probe.bind((BRIDGE, 0))
            self._port = probe.getsockname()[1]
        # The program itself instead of "git daemon", which would run it as a child that outlives it.
        command = [f"{_git('--exec-path').strip()}/git-daemon", "--export-all", f"--base-path={self._bare.parent}"]
        command += [f"--listen={BRIDGE}", f"--port={self._port}", "--reuseaddr", str(self._bare)]
        self._daemon = subprocess.Popen(command, env=_environment(), stderr=subprocess.DEVNULL)
        wait_for(self._answers, what="the repository is served")
        self.url = f"git://{BRIDGE}:{self._port}/network.git"

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((BRIDGE, self._port)) == 0

    def push(self, files: dict[str, str]) -> None:
        """Commit the current content of these files and publish the commit."""
        for name, text in files.items():
            (self._work / name).write_text(text, encoding="utf-8")
        at = ("-C", str(self._work))
        _git(*at, "add", "--all")
        _git(*at, "commit", "--quiet", "--message", "Change the network")
        _git(*at, "push", "--quiet", str(self._bare), "main")

    def close(self) -> None:
        """Stop serving."""
        self._daemon.terminate()
        self._daemon.wait(60)


def _environment() -> dict[str, str]:
    return {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def _git(*arguments: str) -> str:
    command = ["git", "-c", "user.name=operator", "-c", "user.email=operator@example.com", *arguments]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
