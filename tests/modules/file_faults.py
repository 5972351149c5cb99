# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs of a node whose files cannot be written: the faults, and what a program did to the files.

The faults are those of ``tests.lab.faulty_disk``, in the namespace of the node. Of the calls that fail, it is the Nth.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.base.installed import HISTORY_DIRECTORY
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.form import unpack_record
from tests.lab.faulty_disk import CALLS, FULL, REASONS, mount_script, tracer
from tests.lab.namespaces import HIDDEN, ROOT, Namespaces, ansible_environment

#: Where programs of the node write, each a file system of its own.
PLACES = (*HIDDEN, "/etc/modprobe.d", "/etc/kubernetes")
#: What the programs serve, and on which node.
NODE = "lab-iptables"
CONNTRACK = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
CONFIGURATION: dict[str, Any] = {"clusterCIDR": "10.244.0.0/16", "conntrack": CONNTRACK}
#: The same, as the file of a command.
DOCUMENT = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", **CONFIGURATION}

_LIST = """
import base64, json, os, sys
found = {}
for place in sys.argv[1:]:
    for directory, _, names in os.walk(place):
        for name in names:
            path = os.path.join(directory, name)
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    found[path] = [os.stat(path).st_ino, base64.b64encode(file.read()).decode()]
print(json.dumps(found))
"""
_MODULE = """
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
with patch_module_args(json.loads(sys.argv[2])):
    importlib.import_module(f"ansible_collections.kubenode.proxy.plugins.modules.{sys.argv[1]}").main()
"""

Files = dict[str, list[Any]]


class Fault(NamedTuple):
    """READ_ONLY or FULL with a directory, or a kind of CALLS with the number of the call that fails."""

    kind: str
    where: str

    @property
    def reason(self) -> str:
        """Return what the kernel says."""
        return REASONS[self.kind]


class Outcome(NamedTuple):
    """How a program ended: whether it succeeded, and its error, or its warnings."""

    ok: bool
    said: str


def command(*words: str) -> list[str]:
    """Return a command line of the node command."""
    return [sys.executable, "-m", "plugins.module_utils.command.cli", *words]


def module(name: str, **options: Any) -> list[str]:
    """Return a command line that runs a module of the collection, as Ansible's payload does."""
    given = {**options, "_ansible_remote_tmp": "/run/ansible", "_ansible_check_mode": False}
    return [sys.executable, "-c", _MODULE, name, json.dumps(given)]


class FaultyNode(Namespaces):
    """A node on which files cannot be written for a time."""

    def __init__(self, scratch: Path) -> None:
        super().__init__()
        self.scratch = scratch
        self.kept = scratch / "kept"
        for place in PLACES[len(HIDDEN) :]:
            self.shell(f"mkdir -p {place} && mount -t tmpfs -o mode=0755 node-test {place}")

    def shell(self, script: str) -> str:
        """Run a script on the node, and return its output."""
        done = self.execute(["sh", "-ec", script], ROOT)
        assert done.returncode == 0, (script, done.stderr)
        return done.stdout

    def files(self) -> Files:
        """Return the inode and the content of each file, by its path."""
        found: Files = json.loads(self.shell(shlex.join([sys.executable, "-c", _LIST, *PLACES])))
        return found

    def rules(self) -> str:
        """Return what the kernel has been given, without counters."""
        return re.sub(r"counter packets \d+ bytes \d+", "", self.shell("nft list ruleset"))

    def run(self, argv: Sequence[str], prefix: Sequence[str] = ()) -> Outcome:
        """Run a program of the node."""
        environment = {**ansible_environment(self.scratch), "HOME": str(self.scratch)}
        environment["PYTHONPATH"] = f"{ROOT}:{ROOT}/collections:{environment['PYTHONPATH']}"
        done = self.execute([*prefix, *argv], ROOT, "", environment)
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        if argv[1] == "-c":
            answer = json.loads(done.stdout)
            assert "exception" not in answer, answer
            warnings = (each["event"]["msg"] for each in answer.get("warnings", ()))
            return Outcome(not answer.get("failed"), answer.get("msg") or "\n".join(warnings))
        return Outcome(done.returncode == 0, done.stderr.strip())

    def suffer(self, argv: Sequence[str], fault: Fault) -> Outcome:
        """Run a program while a fault lasts, and end the fault."""
        if fault.kind in CALLS:
            return self.run(argv, self._tracer(fault.kind, f":error=EIO:when={fault.where}"))
        where = shlex.quote(fault.where)
        self.shell(mount_script(fault.kind, fault.where, self.kept))
        try:
            return self.run(argv)
        finally:
            if fault.kind == FULL:
                self.shell(
                    f"rm {where}/.filled; find {self.kept} -mindepth 1 -delete;"
                    f"cp -a {where}/. {self.kept}; umount {where}; umount {self.kept}"
                )
            else:
                self.shell(f"umount {where}")

    def calls(self, argv: Sequence[str], kind: str) -> int:
        """Run a program without faults, and return how many calls of a kind it makes."""
        outcome = self.run(argv, self._tracer(kind))
        assert outcome.ok, outcome
        return len((self.scratch / "calls").read_text().splitlines())

    def _tracer(self, kind: str, injection: str = "") -> list[str]:
        return tracer(kind, self.scratch / "calls", ["--seccomp-bpf"], injection)


def changed(before: Files, after: Files) -> list[str]:
    """Return the paths of the files that were written or removed."""
    return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))


def is_whole(path: str, written: list[Any]) -> bool:
    """Return whether a file is complete, where its format shows that. One without content counts as missing."""
    content = base64.b64decode(written[1])
    try:
        if path.startswith(f"{HISTORY_DIRECTORY}/state-"):
            unpack_record(content)
        elif path.endswith(".gz"):
            json.loads(gzip.decompress(content))
        elif path.endswith(".json") and content:
            json.loads(content.partition(b"\n")[2] if path.endswith("unchanged.json") else content)
    except (OSError, EOFError, ValueError, ProxyError):
        return False
    return not os.path.basename(path).startswith(".")
