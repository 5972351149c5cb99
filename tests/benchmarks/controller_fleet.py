# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A fleet of namespace nodes for controller_scale: each with its own sshd, on one bridge beside the controller.

The nodes see this machine's programs under an overlay in memory (tests.lab.node); what Ansible copies to them is gone
with them. The bridge's ports count what each node has been sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Optional, Sequence

from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.kernel.backends import manifests, write_manifests
from tests.lab import ssh, system
from tests.lab.node import Specification
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
CONTROLLER = "172.30.0.1"
SYSCTLS = {"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1"}
#: An agent that serves a static Service; the API server refuses connections.
AGENT = """\
{{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "nftables",
  "clientConnection": {{"kubeconfig": "{scratch}/kubeconfig"}}, "conntrack": {{"maxPerCore": 0, "min": 0}}}}
---
{{"apiVersion": "kubenode.proxy/v1alpha1", "kind": "NodeProxyConfiguration",
  "staticServices": {{"directory": "{scratch}/services"}}}}
"""


class Fleet:
    """Nodes with these names; a context manager. ``directory`` has keys, the inventory and the nodes' shared files."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.directory = directory
        self.names = list(names)
        self.prefix = f"knb{os.getpid()}"
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def controller(self) -> str:
        """The network namespace from which all nodes can be reached."""
        return f"{self.prefix}-c"

    @property
    def inventory(self) -> Path:
        """An inventory of all nodes; ``--limit`` takes a part."""
        return self.directory / "inventory.json"

    def address(self, number: int) -> str:
        """Return the address of a node, counted from 0."""
        return f"172.30.{1 + number // 200}.{1 + number % 200}"

    def __enter__(self) -> Fleet:
        try:
            self._make()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._end()

    def traffic(self, count: int) -> tuple[int, int]:
        """Return the bytes sent to and received from the first ``count`` nodes, on the wire, since their start."""
        text = system.run(["ip", "-n", self.controller, "-s", "-j", "link", "show"])
        wanted = {f"p{number}" for number in range(count)}
        ports = [link["stats64"] for link in json.loads(text) if link["ifname"] in wanted]
        return sum(port["tx"]["bytes"] for port in ports), sum(port["rx"]["bytes"] for port in ports)

    def start_agents(self) -> None:
        """Start an agent on each node, and wait until all serve. Raises AssertionError if one does not."""
        authority = make_certificates(self.directory / "tls").authority
        for name in self.names:
            scratch = self.directory / name
            write_manifests(scratch / "services", manifests())
            write_kubeconfig(scratch / "kubeconfig", "https://127.0.0.1:1", authority, "test-token")
            (scratch / "agent.yaml").write_text(AGENT.format(scratch=scratch), encoding="utf-8")
            self._start_agent(scratch)
        logs = [self.directory / name / "agent.log" for name in self.names]
        wait_for(lambda: all("filled an empty node" in log.read_text(encoding="utf-8") for log in logs), 600.0, 0.5)

    # ---- parts

    def _start_agent(self, scratch: Path) -> None:
        inside = ["nsenter", "--target", (scratch / "pid").read_text(encoding="ascii"), "--all"]
        agent = [sys.executable, "-m", "module_utils.command.cli", "run", "--config", str(scratch / "agent.yaml")]
        with open(scratch / "agent.log", "wb") as log:
            process = subprocess.Popen(
                [*inside, *agent, "--cache", ""],
                env={**os.environ, "PYTHONPATH": str(ROOT / "plugins")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)

    def _make(self) -> None:
        ssh.make_keys(self.directory, "*")
        lines = [f"netns add {self.controller}"]
        system.ip_batch(lines)
        system.ip_batch(
            ["link set lo up", "link add br0 type bridge", "link set br0 up", f"addr add {CONTROLLER}/16 dev br0"],
            self.controller,
        )
        for number in range(len(self.names)):
            self._start(number)
        for number, name in enumerate(self.names):
            self._wait(number, name)
        self._write_inventory()

    def _start(self, number: int) -> None:
        name = self.names[number]
        space = f"{self.prefix}-{number}"
        port = f"p{number}"
        system.ip_batch([f"netns add {space}"])
        system.ip_batch(
            [f"link add {port} type veth peer name eth0 netns {space}", f"link set {port} up master br0"],
            self.controller,
        )
        scratch = self.directory / name
        scratch.mkdir()
        specification = Specification(
            hostname=name,
            scratch=str(scratch),
            visible=[str(ROOT), sys.prefix, sys.base_prefix],
            sysctls=SYSCTLS,
            network=[
                "link set eth0 up",
                f"addr add {self.address(number)}/16 dev eth0",
                f"route add default via {CONTROLLER}",
            ],
            environment=ssh.ENVIRONMENT,
            sshd=str(ssh.prepare_server(self.directory, scratch, self.address(number))),
        )
        self.processes.append(ssh.start_namespace_node(specification, f"/run/netns/{space}"))

    def _wait(self, number: int, name: str, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(OSError):
                if ssh.greets(f"/run/netns/{self.controller}", self.address(number)):
                    return
            if time.monotonic() > deadline:
                words = (self.directory / name / "console").read_text(encoding="utf-8", errors="replace")
                raise system.LabError(f"node {name} is not ready after {timeout:.0f} s:\n{words[-2000:]}")
            time.sleep(0.1)

    def _write_inventory(self) -> None:
        hosts: dict[str, dict[str, str]] = {
            name: {"ansible_host": self.address(number)} for number, name in enumerate(self.names)
        }
        variables = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.directory / "key"),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={self.directory}/known_hosts -o IdentitiesOnly=yes",
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        text = json.dumps({"k8s_cluster": {"hosts": hosts, "vars": variables}})
        self.inventory.write_text(text + "\n", encoding="utf-8")

    def _end(self) -> None:
        for name in self.names:
            # The node's first process: its end is the end of everything in its process namespace.
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.directory / name / "pid").read_text(encoding="ascii")), signal.SIGKILL)
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
        listed = [line.split()[0] for line in system.run(["ip", "netns", "list"]).splitlines() if line]
        system.ip_batch([f"netns del {name}" for name in listed if name.startswith(f"{self.prefix}-")])
