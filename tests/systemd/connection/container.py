# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible connection to a container on this machine through its namespaces; files are sent over standard input.

It is that of root, or of the ordinary user who has sudo there, if the host has the variable ansible_user.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection import ConnectionBase

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

DOCUMENTATION = """
name: container
author: kubenode.proxy contributors
short_description: Runs tasks in a container of this machine
description:
  - The address of the host in the inventory is the number of a process in the container.
  - The modules of a container with a directory /opt/compiled keep their compiled code there.
  - A container with a file /run/lost-when is unreachable as long as the path is there that the file names.
options: {}
"""


def _is_lost(root: Path) -> bool:
    """Return whether a test wants the container with this root file system to be unreachable now."""
    try:
        path = (root / "run/lost-when").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return False
    return (root / path.lstrip("/")).exists()


class Connection(ConnectionBase):
    """A container on this machine, entered as root or as an ordinary user."""

    transport = "container"
    has_pipelining = True

    def _connect(self) -> Connection:
        self._connected = True
        return self

    def _run(self, command: str, data: bytes) -> tuple[int, bytes, bytes]:
        pid = int(self._play_context.remote_addr)
        if not os.path.exists(f"/proc/{pid}"):
            raise AnsibleConnectionFailure(f"process {pid} of the container does not exist")
        if _is_lost(Path(f"/proc/{pid}/root")):
            raise AnsibleConnectionFailure("no route to host")
        user, home = self._play_context.remote_user or "root", "/root"
        words = ["nsenter", f"--target={pid}", "--all", "--wdns=/"]
        if user != "root":
            words += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
            home = f"/home/{user}"
        words += ["env", "-i", f"HOME={home}", f"PATH={_PATH}"]
        if Path(f"/proc/{pid}/root/opt/compiled").is_dir():
            words += ["PYTHONPATH=/opt/compiled/site", "KUBENODE_COMPILED=/opt/compiled/code"]
        done = subprocess.run([*words, "sh", "-c", command], input=data, capture_output=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def exec_command(self, cmd: str, in_data: Any = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        """Run a command line."""
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        return self._run(cmd, in_data or b"")

    def put_file(self, in_path: str, out_path: str) -> None:
        """Copy a file into the container."""
        super().put_file(in_path, out_path)
        with open(in_path, "rb") as file:
            status, _output, error = self._run(f"cat >{shlex.quote(out_path)}", file.read())
        if status:
            raise AnsibleConnectionFailure(f"{out_path}: {error.decode(errors='replace')}")

    def fetch_file(self, in_path: str, out_path: str) -> None:
        """Copy a file out of the container."""
        super().fetch_file(in_path, out_path)
        status, output, error = self._run(f"cat {shlex.quote(in_path)}", b"")
        if status:
            raise AnsibleConnectionFailure(f"{in_path}: {error.decode(errors='replace')}")
        with open(out_path, "wb") as file:
            file.write(output)

    def close(self) -> None:
        """Do nothing: no connection is kept open."""
        self._connected = False
