# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Playbooks of the demonstration, started in the background so that the next step does not wait.

The runs share the packed modules (:mod:`tests.lab.ansible_playbook`), which each run of Ansible would pack again.
"""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Callable, NamedTuple

from tests.lab.ansible_playbook import ansible_playbook
from tests.lab.cluster import ROOT, Lab

VARIABLES = Path(__file__).with_name("variables.yml")
RECAP = re.compile(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.MULTILINE)


class Run(NamedTuple):
    """A playbook's command line, exit status, output, and number of changed tasks by node."""

    command: str
    status: int
    text: str
    changed: dict[str, int]

    @property
    def recap(self) -> str:
        """Return the output from the recap on."""
        return self.text[self.text.rfind("PLAY RECAP") :]


class Playbooks:
    """Runs the collection's playbooks against a laboratory."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._pool = ThreadPoolExecutor(2)

    def start(self, name: str, *options: str, after: Callable[[], None] = lambda: None) -> Future[Run]:
        """Start a playbook once ``after`` has returned. An exception of ``after`` reaches the caller of result()."""

        def work() -> Run:
            after()
            return self._run(name, options)

        return self._pool.submit(work)

    def _run(self, name: str, options: tuple[str, ...]) -> Run:
        argv = [*ansible_playbook(), "-i", str(self._lab.inventory)]
        argv += ["-e", f"@{VARIABLES}", "-e", f"service_proxy_snapshot={self._lab.snapshot}"]
        argv += [f"kubenode.proxy.{name}", *options]
        environment = {
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_HOME": str(self._lab.directory / "ansible"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_DISPLAY_OK_HOSTS": "0",
            "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "0",
            "ANSIBLE_DEPRECATION_WARNINGS": "0",
            "LC_ALL": "C.UTF-8",
        }
        done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        changed = {match[0]: int(match[1]) for match in RECAP.findall(done.stdout)}
        command = " ".join(["ansible-playbook", "-i", "INVENTORY", f"kubenode.proxy.{name}", *options])
        return Run(command, done.returncode, done.stdout, changed)
