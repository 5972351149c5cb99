# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The miniature cluster: a namespace node for iptables, a user-mode Linux node for IPVS, their pods and a client."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Optional, Sequence

from tests.lab import ssh, uml
from tests.lab.node import Specification
from tests.lab.probe import Answer, ask
from tests.lab.system import LabError, ip_batch, run
from tests.lab.topology import NODE_SYSCTLS, NODES, LabNode, client_network, fabric_network, node_network, pods_of

ROOT = Path(__file__).resolve().parent.parent.parent
SNAPSHOT = Path(__file__).with_name("demo") / "cluster.json"
GUEST_MODULES = ("ipv6", "veth")
TOOLS = {
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "/usr/sbin/sshd": "openssh-server",
    "iptables": "iptables",
    "iptables-legacy": "iptables",
    "ipset": "ipset",
    "ipvsadm": "ipvsadm",
    "conntrack": "conntrack",
    "modprobe": "kmod",
    "hostname": "hostname",
}


def missing(guests: bool = True) -> list[str]:
    """Return what this host lacks for the laboratory, one line each with its remedy.

    ``guests``: whether a node has its own kernel.
    """
    lines = []
    if os.geteuid() != 0:
        return ["the laboratory makes network namespaces and needs root: run as root (nothing on the host is changed)"]
    absent = {package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if absent:
        lines.append(f"tools are missing: apt-get install {' '.join(sorted(absent))}")
    with open("/proc/filesystems", encoding="ascii") as stream:
        if "overlay" not in stream.read().split():
            lines.append("this kernel has no overlayfs: modprobe overlay")
    problem = uml.missing() if guests else None
    return [*lines, problem] if problem else lines


class Lab:
    """A running or future laboratory with a name; several may run side by side.

    As a context manager it is up inside the block and removed afterwards.
    """

    def __init__(
        self,
        name: str = "lab",
        snapshot: Path = SNAPSHOT,
        nodes: Sequence[str] = (),
        layout: Sequence[LabNode] = NODES,
    ) -> None:
        """Name a laboratory without starting it. ``nodes``: those of the layout to start; empty for all of them."""
        if not name.isalnum() or len(name) > 8:
            raise LabError(f"laboratory name {name!r}: up to eight letters and digits")
        self.name = name
        self.snapshot = snapshot
        self.directory = Path(tempfile.gettempdir()) / f"kubenode-{name}"
        self.layout = tuple(layout)
        self.nodes: tuple[LabNode, ...] = tuple(node for node in layout if not nodes or node.name in nodes)
        unknown = set(nodes) - {node.name for node in layout}
        if unknown:
            known = ", ".join(node.name for node in layout)
            raise LabError(f"nodes {', '.join(sorted(unknown))}: known are {known}")

    def __enter__(self) -> Lab:
        self.up()
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.down()

    # ---- names

    def namespace(self, part: str) -> str:
        """Return the host's name for the network namespace of a part: fabric, client or a node."""
        return f"kn{self.name}-{part}"

    @property
    def client_path(self) -> str:
        """The path of the client's network namespace."""
        return f"/run/netns/{self.namespace('client')}"

    @property
    def inventory(self) -> Path:
        """Return the path of the laboratory's Ansible inventory: groups k8s_cluster, lab, and one for each mode."""
        return self.directory / "inventory.json"

    def node(self, name: str) -> LabNode:
        """Return the node with this name."""
        return next(node for node in self.nodes if node.name == name)

    # ---- life

    def up(self, later: Sequence[str] = ()) -> None:
        """Start all nodes and wait until they accept ssh; remove what an earlier run left first.

        The caller waits for the nodes named in ``later`` itself, with :meth:`wait`.
        """
        problems = missing(any(node.own_kernel for node in self.nodes))
        if problems:
            raise LabError("\n".join(problems))
        self.down()
        self.directory.mkdir(mode=0o700)
        try:
            ssh.make_keys(self.directory, "lab")
            self._make_fabric()
            for node in sorted(self.nodes, key=lambda node: not node.own_kernel):
                self._start(node)
            self._write_inventory()
            for node in self.nodes:
                if node.name not in later:
                    self.wait(node)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Stop the nodes and remove every namespace and file of this laboratory."""
        for record in self._records():
            _end(record)
        shutil.rmtree(self.directory, ignore_errors=True)
        prefix = self.namespace("")
        listed = run(["ip", "netns", "list"]).splitlines()
        names = [line.split()[0] for line in listed if line.startswith(prefix)]
        if names:
            ip_batch([f"netns del {name}" for name in names])

    def status(self) -> dict[str, str]:
        """Return the state of each node: running or stopped."""
        states = {node.name: "stopped" for node in self.nodes}
        for record in self._records():
            states[record["node"]] = "running" if _is_ours(record) else "stopped"
        return states

    # ---- use

    def ssh(self, node: str, command: str) -> subprocess.CompletedProcess[str]:
        """Run a shell command on a node."""
        target = self.node(node)
        argv = ["ssh", "-i", str(self.directory / "key"), *self._ssh_options(), f"root@{target.address}", command]
        return subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)

    def output(self, node: str, command: str) -> str:
        """Run a shell command on a node and return what it prints. Raises LabError if it fails."""
        done = self.ssh(node, command)
        if done.returncode != 0:
            raise LabError(f"{node}: {command}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def ask(self, protocol: str, address: str, port: int, source: str, timeout: float = 4.0) -> Answer:
        """Send one request from an address of the outside client."""
        return ask(protocol, address, port, source=source, namespace=self.client_path, timeout=timeout)

    def ask_from_pod(self, node: str, pod: str, protocol: str, address: str, port: int, count: int = 1) -> list[Answer]:
        """Send requests from a pod of a node."""
        module = f"{shlex.quote(sys.executable)} -m tests.lab.probe"
        where = f"cd {shlex.quote(str(ROOT))} && PYTHONDONTWRITEBYTECODE=1"
        arguments = f"{protocol} {address} {port} --count {count} --namespace /run/netns/{pod}"
        return [Answer(**entry) for entry in json.loads(self.output(node, f"{where} {module} {arguments}"))]

    # ---- parts

    def _records(self) -> list[dict[str, str]]:
        if not self.directory.is_dir():
            return []
        return [json.loads(path.read_text(encoding="utf-8")) for path in self.directory.glob("*/process.json")]

    def _make_fabric(self) -> None:
        fabric, client = self.namespace("fabric"), self.namespace("client")
        plain = [node for node in self.nodes if not node.own_kernel]
        lines = [f"netns add {name}" for name in (fabric, client, *(self.namespace(node.name) for node in plain))]
        lines.append(f"link add client netns {fabric} type veth peer name eth0 netns {client}")
        for node in plain:
            inside = self.namespace(node.name)
            lines.append(f"link add {node.device} netns {fabric} type veth peer name eth0 netns {inside}")
        ip_batch(lines)
        for node in self.nodes:
            if node.own_kernel:
                uml.connect(self.namespace(node.name), fabric, node.device)
        for name in (fabric, client):
            settings = [
                f"{key}={value}" for key, value in NODE_SYSCTLS.items() if name == fabric or "forward" not in key
            ]
            run(["ip", "netns", "exec", name, "sysctl", "-q", "-w", *settings])
        ip_batch(fabric_network(self.nodes), fabric)
        ip_batch(client_network(self.layout), client)

    def _start(self, node: LabNode) -> None:
        scratch = self.directory / node.name
        scratch.mkdir()
        pods = pods_of(self.snapshot, node)
        echo = [
            {"name": pod.name, "namespace": f"/run/netns/{pod.name}", "ports": [list(port) for port in pod.ports]}
            for pod in pods
        ]
        (scratch / "echo.json").write_text(json.dumps(echo, indent=1), encoding="ascii")
        specification = Specification(
            hostname=node.name,
            scratch=str(scratch),
            visible=[str(ROOT), sys.prefix, sys.base_prefix],
            modules=list(GUEST_MODULES) if node.own_kernel else [],
            sysctls=NODE_SYSCTLS,
            network=node_network(node, "vec0" if node.own_kernel else "eth0", self.layout),
            pods=[{"name": pod.name, "address": pod.address, "address6": pod.address6} for pod in pods],
            environment=ssh.ENVIRONMENT,
            echo=str(scratch / "echo.json"),
            sshd=str(ssh.prepare_server(self.directory, scratch, node.address)),
        )
        if node.own_kernel:
            network = uml.Network(self.namespace(node.name), f"02:4b:4e:00:00:{node.number:02x}")
            process = uml.start(specification, "512M", network).pid
        else:
            process = ssh.start_namespace_node(specification, f"/run/netns/{self.namespace(node.name)}").pid
        record = {"node": node.name, "process": str(process), "kind": "uml" if node.own_kernel else "namespace"}
        (scratch / "process.json").write_text(json.dumps({**record, "scratch": str(scratch)}), encoding="ascii")

    def _ssh_options(self) -> list[str]:
        proxy = [sys.executable, "-m", "tests.lab.connect", self.namespace("fabric")]
        command = f"env PYTHONPATH={shlex.quote(str(ROOT))} {' '.join(map(shlex.quote, proxy))} %h %p"
        options = {
            "ProxyCommand": command,
            "UserKnownHostsFile": str(self.directory / "known_hosts"),
            "HostKeyAlias": "lab",
            "IdentitiesOnly": "yes",
            "LogLevel": "ERROR",
            "ConnectTimeout": "30",
            "ServerAliveInterval": "10",
            "ServerAliveCountMax": "6",
            "ControlMaster": "auto",
            "ControlPersist": "60s",
            "ControlPath": str(self.directory / "%C"),
        }
        return [part for key, value in options.items() for part in ("-o", f"{key}={value}")]

    def wait(self, node: LabNode, timeout: float = 180) -> None:
        """Wait until a node accepts ssh and its pods answer. Raises LabError with the node's last words."""
        scratch = self.directory / node.name
        deadline = time.monotonic() + timeout
        path = f"/run/netns/{self.namespace('fabric')}"
        while True:
            if (scratch / "ready").exists():
                with contextlib.suppress(OSError):
                    if ssh.greets(path, node.address) and self._echo_ready(scratch):
                        return
            problem = scratch / "error"
            if problem.exists():
                raise LabError(f"node {node.name} did not start:\n{problem.read_text(encoding='utf-8')}")
            if time.monotonic() > deadline:
                words = (scratch / "console").read_text(encoding="utf-8", errors="replace")[-2000:]
                raise LabError(f"node {node.name} is not ready after {timeout:.0f} s:\n{words}")
            time.sleep(0.1)

    @staticmethod
    def _echo_ready(scratch: Path) -> bool:
        return b"ready" in (scratch / "services.log").read_bytes()

    def _write_inventory(self) -> None:
        options = " ".join(shlex.quote(option) for option in self._ssh_options())
        hosts = {node.name: {"ansible_host": node.address} for node in self.nodes}
        variables = {
            "ansible_user": "root",
            "ansible_connection": "ssh",
            "ansible_ssh_private_key_file": str(self.directory / "key"),
            "ansible_ssh_args": options,
            "ansible_ssh_pipelining": True,
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_become": False,
        }
        modes = sorted({node.mode for node in self.nodes} | {"iptables", "ipvs"})
        groups: dict[str, dict[str, dict[str, dict[str, str]]]] = {
            mode: {"hosts": {node.name: {} for node in self.nodes if node.mode == mode}} for mode in modes
        }
        cluster: dict[str, dict[str, dict[str, str]]] = {"children": {"lab": {}}}
        inventory = {"lab": {"hosts": hosts, "vars": variables}, "k8s_cluster": cluster, **groups}
        self.inventory.write_text(json.dumps(inventory, indent=2) + "\n", encoding="utf-8")


def _is_ours(record: dict[str, str]) -> bool:
    """Report whether the recorded process is still that node, not a later process with the same number."""
    try:
        words = Path("/proc", record["process"], "cmdline").read_bytes()
    except OSError:
        return False
    return record["scratch"].encode() in words


def _end(record: dict[str, str]) -> None:
    if not _is_ours(record):
        return
    process = int(record["process"])
    if record["kind"] == "uml":
        uml.stop(process)
        return
    try:
        # The node's first process: its end is the end of everything in its process namespace.
        os.kill(int(Path(record["scratch"], "pid").read_text(encoding="ascii")), signal.SIGKILL)
    except (OSError, ValueError):
        os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while _is_ours(record) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, os.WNOHANG)
        time.sleep(0.02)
