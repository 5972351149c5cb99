# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An agent that writes each of its files soon, on a disk of its own that can become faulty."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

from tests.apiserver.accounts import sign
from tests.kernel.agent_node import AgentNode, cluster_ip
from tests.lab.faulty_disk import CALLS, READ_ONLY, mount_script, tracer
from tests.waiting import wait_for

#: The agent saves the cluster state after half a minute, checks its socket every ten seconds, and its token after
#: minutes.
SOON = """
import sys
from module_utils.agent import agent
from module_utils.cluster.api.access import token_renewal
agent.CACHE_SECONDS = agent.CONTROL_SECONDS = token_renewal.PAUSE_SECONDS = token_renewal.CHECK_SECONDS = 0.3
from module_utils.command.cli import main
sys.exit(main())
"""
ACCOUNT = "/api/v1/namespaces/kube-system/serviceaccounts/kubenode-proxy"
_UID = "00000000-0000-4000-8000-000000000001"
_NAMED = re.compile(r'^\d+ +(\w+)\((?:AT_FDCWD, |\d+, \{sa_family=AF_UNIX, sun_path=)?"([^"]+)"(.*)')
_OPENED, _CREATED = (
    "open,openat",
    "creat,mkdir,mkdirat,unlink,unlinkat,symlink,symlinkat,link,linkat,mknod,mknodat,bind",
)


class FilesNode(AgentNode):
    """An agent with one Service, one static Service, a token that it renews, and file systems of its own."""

    def __init__(self, scratch: Path, mode: str = "nftables", variant: str = "") -> None:
        super().__init__(scratch, mode, variant)
        self.prefix = ["unshare", "--mount", "--propagation", "private"]
        self.token = scratch / "token"
        self.options = ["--token", str(self.token)]
        # Also the programs of iptables take only this lock.
        self.environment.update(XTABLES_LOCKFILE=str(scratch / "xtables.lock"))
        assert self.api is not None
        self.api.accounts.objects[ACCOUNT] = {
            "metadata": {"name": "kubenode-proxy", "namespace": "kube-system", "uid": _UID}
        }
        self.write_stale_token()
        self.put_service(1)

    def write_stale_token(self) -> None:
        """Write a token that is to be renewed at once, because most of its life is over."""
        now = int(time.time())
        account = {"name": "kubenode-proxy", "uid": _UID}
        claims = {"sub": "system:serviceaccount:kube-system:kubenode-proxy", "iat": now - 3000, "exp": now + 600}
        self.token.write_text(sign({**claims, "kubernetes.io": {"serviceaccount": account}}) + "\n")

    def renew_tokens(self, renews: bool) -> None:
        """Have the API server issue tokens, or not."""
        assert self.api is not None
        self.api.accounts.has_requests = renews

    def _command(self, *words: str) -> list[str]:
        return [*self.prefix, sys.executable, "-c", SOON, *words]

    def serve(self, number: int) -> None:
        """Add a Service and wait until the kernel has it."""
        self.put_service(number)
        wait_for(lambda: cluster_ip(number) in self.kernel_text(self.kernel_variant), 60.0)

    def written(self) -> dict[str, tuple[int, int]]:
        """Return inode and time of change of the files in the agent's directories."""
        found = [*(self.scratch / "run").iterdir(), *self.scratch.glob("*cache.gz*"), *self.scratch.glob(".*")]
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found if path.is_file()}

    def lines(self, text: str) -> list[str]:
        """Return the lines of the agent's log with a text."""
        return [line for line in self.log.splitlines() if text in line]

    @contextlib.contextmanager
    def fault(self, kind: str) -> Iterator[None]:
        """Make the agent's directory faulty for a time; mounts end with the agent."""
        assert self.process is not None
        process = self.process.pid
        if kind in CALLS:
            command = tracer(kind, f"{self.scratch}.calls", ["-p", str(process)], ":error=EIO")
            with subprocess.Popen(command) as strace:
                wait_for(lambda: f"TracerPid:\t{strace.pid}\n" in Path(f"/proc/{process}/status").read_text(), 30.0)
                try:
                    yield
                finally:
                    strace.terminate()
            return
        self.inside(mount_script(kind, self.scratch, f"{self.scratch}.kept"))
        try:
            yield
        finally:
            if self.process is not None:
                self.inside(f"umount -l {shlex.quote(str(self.scratch))}")

    def faulty(self, kind: str) -> list[str]:
        """Return the beginning of a command line whose program finds the agent's directory faulty."""
        script = mount_script(kind, self.scratch, f"{self.scratch}.kept")
        return ["sh", "-ec", f'{script}; exec "$@"', "sh"]

    def inside(self, script: str) -> None:
        """Run a script with the file systems of the agent."""
        assert self.process is not None
        subprocess.run(["nsenter", "-m", "-t", str(self.process.pid), "sh", "-ec", script], check=True)

    def lose(self, name: str, kind: str) -> None:
        """Remove a file of the agent during a fault, as another program would."""
        (self.scratch / name).unlink()
        if kind != READ_ONLY:
            # Removing it would make room for another file.
            place = shlex.quote(str(self.scratch))
            self.inside(f"mv {place}/{name} {place}/.filled-{name}")

    def traced(self) -> Path:
        """Have the next start write down which files the agent and its programs name; return the file for that."""
        log = self.scratch.with_suffix(".trace")
        calls = f"{_OPENED},{_CREATED},{CALLS['rename']}"
        self.prefix = [*self.prefix, *tracer(calls, log, ["-D"])]
        return log


def named(trace: Path, below: Path) -> tuple[set[str], set[str]]:
    """Return the files that programs have read below a directory, and all that they have written, on disks."""
    read, written = set(), set()
    for call, path, rest in (found.groups() for found in map(_NAMED.match, trace.read_text().splitlines()) if found):
        if " = -1 " in rest or path.startswith(("/proc/", "/sys/", "/dev/")) or "/__pycache__" in path:
            continue
        if os.path.isdir(path):
            continue
        # Without the random part of a temporary name.
        name = re.sub(r"(^|/)\.([^/]+)\.\w+$", r"\1\2", path.replace(f"{below}/", ""))
        if call not in _OPENED.split(",") or any(flag in rest for flag in ("O_WRONLY", "O_RDWR", "O_CREAT")):
            written.add(name)
        elif name != path:
            read.add(name)
    return read, written
