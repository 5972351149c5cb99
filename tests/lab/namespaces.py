# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The smallest node: a network and a mount namespace that a process keeps alive, and Ansible's environment for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Sequence

from tests.lab.ansible_playbook import compiled_environment
from tests.lab.background import Background
from tests.lab.system import NETWORK_DEFAULTS

ROOT = Path(__file__).resolve().parents[2]
#: Directories that modules may write to on a node, hidden behind empty ones in memory.
HIDDEN = ("/run", "/etc/modules-load.d", "/etc/sysctl.d", "/var/lib")
# The rest of /etc is a copy in memory, since roles write there too, and other nodes would read that. An overlay would
# lack the files that a container runtime has mounted there.
_COPY_ETC = [
    "mkdir /run/etc",
    "mount -t tmpfs -o mode=0755 node-test /run/etc",
    "cp -a /etc/. /run/etc",
    "mount -n --move /run/etc /etc",
    "rmdir /run/etc",
]


class Namespaces:
    """The two namespaces, with ``lo`` up and nothing else, until closed."""

    def __init__(self) -> None:
        steps = [f"mkdir -p {path} && mount -t tmpfs -o mode=0755 node-test {path}" for path in HIDDEN]
        steps[1:1] = _COPY_ETC
        for name, value in NETWORK_DEFAULTS.items():
            steps.append(f"{{ [ ! -e /proc/sys/net/{name} ] || echo {value} >/proc/sys/net/{name}; }}")
        script = " && ".join([*steps, "ip link set lo up", "echo ready", "exec sleep infinity"])
        self.holder = Background(["unshare", "-n", "-m", "--propagation", "private", "sh", "-c", script])

    def enter(self, directory: Path) -> list[str]:
        """Return the beginning of a command line that runs in the namespaces, in this directory."""
        return ["nsenter", "-t", str(self.holder.pid), "-n", "-m", f"--wd={directory}"]

    def execute(
        self, command: Sequence[str], directory: Path, text: str = "", more: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the namespaces, with this standard input and ``more`` in its environment."""
        return subprocess.run(
            [*self.enter(directory), *command],
            input=text,
            capture_output=True,
            text=True,
            env={**os.environ, **(more or {})},
            check=False,
        )

    def close(self) -> None:
        """End the namespaces."""
        self.holder.close()


def ansible_environment(scratch: Path) -> dict[str, str]:
    """Return the environment in which ansible-playbook finds the collection and writes only below ``scratch``."""
    return {
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
        "ANSIBLE_LOCAL_TEMP": str(scratch / "local"),
        "ANSIBLE_REMOTE_TEMP": str(scratch / "remote"),
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_LOCALHOST_WARNING": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        **compiled_environment(),
    }
