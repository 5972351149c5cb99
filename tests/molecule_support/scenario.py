# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One scenario's nodes, network and API server, from creation to removal.

    client 203.0.113.0/24 --- fabric 172.30.0.0/24 --- nodes 172.30.0.11, .12, ... --- their pods 10.244.N.0/24

Everything runs in network namespaces named after the checkout and the scenario; this machine's own network is not
touched. The controller is in the fabric too: the API server listens at 172.30.0.1. There is no route to other networks.
Nodes are containers (systemd in podman, this machine's kernel) or machines with their own kernels: in user-mode Linux,
or emulated on Debian's own kernel.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Sequence

from tests.lab import qemu, uml
from tests.lab.probe import Answer, ask
from tests.lab.system import LabError, ip_batch, run, socket_inside
from tests.lab.topology import NODE_SYSCTLS, LabNode, client_network, fabric_network, node_network, pods_of
from tests.molecule_support import cluster, machine_image
from tests.systemd import image as containers

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "molecule"
MARK = hashlib.sha256(str(ROOT).encode()).hexdigest()[:4]
UNEXPECTED = "unexpected"
#: The files of this checkout that a node's units need.
INSIDE = ("tests/__init__.py", "tests/lab/*.py", "tests/molecule_support/*.py")


class Platform(NamedTuple):
    """A node as molecule.yml lists it: ``kind`` is container, machine (user-mode Linux) or emulated (QEMU)."""

    name: str
    kind: str = "container"


class Scenario:
    """A scenario by name; ``up`` creates it, all other methods use the existing one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.directory = CACHE / name
        self.prefix = f"knm{MARK}-{name}"

    # ---- names

    @property
    def fabric(self) -> str:
        """Return the fabric's network namespace."""
        return f"{self.prefix}-fabric"

    @property
    def client(self) -> str:
        """Return the client's network namespace."""
        return f"{self.prefix}-client"

    def namespace(self, node: LabNode) -> str:
        """Return the network namespace in which the guest of a node runs."""
        return self.fabric if self.is_emulated(node) else f"{self.prefix}-{node.name}"

    @property
    def nodes(self) -> tuple[LabNode, ...]:
        """Return the nodes, in the order of molecule.yml."""
        return tuple(
            LabNode(name, number, kind != "container") for number, (name, kind) in enumerate(self._platforms(), 1)
        )

    def _platforms(self) -> list[Platform]:
        listed = json.loads((self.directory / "platforms.json").read_text(encoding="utf-8"))
        return [Platform(*item) for item in listed]

    def is_emulated(self, node: LabNode) -> bool:
        """Return whether a node runs on Debian's own kernel."""
        return Platform(node.name, "emulated") in self._platforms()

    def node(self, name: str) -> LabNode:
        """Return the node with this name."""
        return next(node for node in self.nodes if node.name == name)

    def container(self, node: LabNode) -> str:
        """Return the name of a node for podman."""
        return f"{self.prefix}-{node.name}"

    def process(self, node: LabNode) -> int:
        """Return the process ID of a container's init process on this machine."""
        return int(containers.podman("inspect", "--format", "{{.State.Pid}}", self.container(node)).stdout)

    def place(self, node: LabNode) -> Path:
        """Return the host's directory of a node; its subdirectory ``shared`` is /opt/lab on the node."""
        return self.directory / node.name

    def testinfra(self, node: LabNode) -> str:
        """Return the connection string with which testinfra reaches a node."""
        if node.own_kernel:
            return f"ssh://root@{node.address}?ssh_config={self.directory}/ssh_config&timeout=120"
        return f"podman://{self.container(node)}"

    # ---- life

    def up(self, platforms: Sequence[Platform]) -> None:
        """Start everything and wait until every pod answers; leftovers of an earlier run are removed first."""
        self.down()
        for tool in ("podman", "ip", "openssl", "ssh-keygen"):
            if shutil.which(tool) is None:
                raise LabError(f"{tool} is not installed: make setup-lab")
        self.directory.mkdir(parents=True)
        (self.directory / "platforms.json").write_text(json.dumps(platforms), encoding="utf-8")
        cluster.save(self.directory / "cluster.json", cluster.cluster(self.nodes))
        self._make_keys()
        self._make_fabric()
        self._start_control()
        for node in self.nodes:
            self._prepare(node)
            (self._start_machine if node.own_kernel else self._start_container)(node)
        for node in self.nodes:
            self.wait(node)

    def down(self) -> None:
        """Stop the nodes and the API server and remove every namespace and file."""
        for record in self.directory.glob("**/process"):
            with contextlib.suppress(ValueError):
                process = int(record.read_text(encoding="ascii"))
                if str(self.directory).encode() in _command_line(process):
                    uml.stop(process)
        # A guest whose supervisor was killed: its processes are identified by the directory of its console.
        for process in _guests(self.directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        ours = ("--filter", f"name=^{self.prefix}-")
        names = containers.podman("ps", "--all", "--format", "{{.Names}}", *ours).stdout.split()
        if names:
            containers.remove(*names)
        shutil.rmtree(self.directory, ignore_errors=True)
        for connection in Path(tempfile.gettempdir()).glob(f"{self.prefix}-*"):
            connection.unlink()
        listed = [line.split()[0] for line in run(["ip", "netns", "list"]).splitlines() if line]
        spaces = [name for name in listed if name.startswith(f"{self.prefix}-")]
        if spaces:
            ip_batch([f"netns del {name}" for name in spaces])

    def instances(self) -> list[dict[str, Any]]:
        """Return Molecule's instance configuration: how Ansible reaches the nodes."""
        found: list[dict[str, Any]] = []
        for node in self.nodes:
            if node.own_kernel:
                found.append({"instance": node.name, "address": node.address, "user": "root", "port": 22})
            else:
                found.append({"instance": node.name, "address": str(self.process(node)), "connection": "container"})
        return found

    def wait(self, node: LabNode, timeout: float = 300) -> None:
        """Wait until the node's systemd has booted, its pods answer, and a machine accepts ssh."""
        _until(f"node {node.name} is up", lambda: self._is_up(node), timeout, self.place(node) / "console")

    # ---- use

    def ask(self, node: str, protocol: str, address: str, port: int, timeout: float = 4.0) -> Answer:
        """Send one request from the outside client, which reaches virtual addresses through the node."""
        source = self.node(node).client
        return ask(protocol, address, port, source=source, namespace=f"/run/netns/{self.client}", timeout=timeout)

    def document(self) -> Any:
        """Return the List of the cluster's objects."""
        return json.loads((self.directory / "cluster.json").read_text(encoding="utf-8"))

    def start_traffic(self) -> None:
        """Start continuous requests; see the module traffic."""
        place = self.directory / "traffic"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        argv = [sys.executable, "-m", "tests.molecule_support.traffic", self.name, str(self.directory)]
        self._background(argv, place)
        _until("the client sends", (place / "started").exists, 120, place / "console")

    def stop_traffic(self) -> None:
        """Stop the requests and wait for ``traffic.json``."""
        place = self.directory / "traffic"
        os.kill(int((place / "process").read_text(encoding="ascii")), signal.SIGTERM)
        _until("the client reports", (self.directory / "traffic.json").exists, 120, place / "console")

    def watch(self) -> None:
        """Drop and count, from now on, packets of nodes to any host but the API server and the outside client."""
        _address, port = cluster.API_SERVER
        answers = "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
        four = f"-s 172.30.0.0/24 -m comment --comment {UNEXPECTED} -j DROP"
        six = f"-s fd00:172:30::/64 -m comment --comment {UNEXPECTED} -j DROP"
        for line in (
            f"iptables -A INPUT {answers}",
            f"iptables -A INPUT -s 172.30.0.0/24 -p tcp --dport {port} -j ACCEPT",
            f"iptables -A INPUT {four}",
            f"iptables -A FORWARD {answers}",
            "iptables -A FORWARD -d 203.0.113.0/24 -j ACCEPT",
            f"iptables -A FORWARD {four}",
            f"ip6tables -A FORWARD {answers}",
            "ip6tables -A FORWARD -d 2001:db8:113::/64 -j ACCEPT",
            f"ip6tables -A FORWARD {six}",
        ):
            run(["ip", "netns", "exec", self.fabric, *line.split()])

    def unexpected(self) -> list[int]:
        """Return how many packets were dropped since ``watch``, one number per rule."""
        found = []
        for program in ("iptables-save", "ip6tables-save"):
            text = run(["ip", "netns", "exec", self.fabric, program, "-c", "-t", "filter"])
            found += [int(line[1:].split(":")[0]) for line in text.splitlines() if UNEXPECTED in line]
        return found

    # ---- parts

    def _make_keys(self) -> None:
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "molecule", "-f", str(self.directory / "key")])
        relay = [sys.executable, "-m", "tests.lab.connect", self.fabric]
        control = Path(tempfile.gettempdir()) / f"{self.prefix}-%C"
        lines = {
            "ProxyCommand": f"env PYTHONPATH={shlex.quote(str(ROOT))} {' '.join(map(shlex.quote, relay))} %h %p",
            "User": "root",
            "IdentityFile": str(self.directory / "key"),
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
            "ConnectTimeout": "120",
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "6",
            "ControlMaster": "auto",
            "ControlPersist": "60s",
            "ControlPath": str(control),
        }
        text = "".join(f"  {key} {value}\n" for key, value in lines.items())
        (self.directory / "ssh_config").write_text("Host *\n" + text, encoding="utf-8")

    def _make_fabric(self) -> None:
        ip_batch([f"netns add {self.fabric}", f"netns add {self.client}"])
        ip_batch([f"link add client netns {self.fabric} type veth peer name eth0 netns {self.client}"])
        for node in self.nodes:
            if self.is_emulated(node):
                ip_batch([f"tuntap add dev {node.device} mode tap"], self.fabric)
            elif node.own_kernel:
                uml.connect(self.namespace(node), self.fabric, node.device)
            else:
                ip_batch([f"link add {node.device} type veth peer name inner{node.number}"], self.fabric)
        for name in (self.fabric, self.client):
            keys = [key for key in NODE_SYSCTLS if name == self.fabric or "forward" not in key]
            run(["ip", "netns", "exec", name, "sysctl", "-q", "-w", *(f"{key}={NODE_SYSCTLS[key]}" for key in keys)])
        ip_batch(fabric_network(self.nodes), self.fabric)
        ip_batch(client_network(self.nodes), self.client)

    def _start_control(self) -> None:
        argv = [sys.executable, "-m", "tests.molecule_support.control", self.fabric, str(self.directory)]
        self._background(argv, self.directory)
        _until("the API server listens", (self.directory / "kubeconfig").exists, 120, self.directory / "console")

    @staticmethod
    def _background(argv: Sequence[str], directory: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with open(directory / "console", "ab") as console:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        (directory / "process").write_text(str(process.pid), encoding="ascii")

    def _prepare(self, node: LabNode) -> None:
        shared = self.place(node) / "shared"
        for pattern in INSIDE:
            for source in ROOT.glob(pattern):
                target = shared / source.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        pods = pods_of(self.directory / "cluster.json", node)
        device = "vec0" if node.own_kernel and not self.is_emulated(node) else "eth0"
        description = {
            "name": node.name,
            "sysctls": NODE_SYSCTLS,
            # Debian's default, which its kernel for user-mode Linux does not support.
            "iptables": "nft" if self.is_emulated(node) else "",
            "network": node_network(node, device, self.nodes),
            "pods": [{"name": pod.name, "address": pod.address, "address6": pod.address6} for pod in pods],
        }
        echo = [{"name": pod.name, "namespace": f"/run/netns/{pod.name}", "ports": pod.ports} for pod in pods]
        (shared / "node.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
        (shared / "echo.json").write_text(json.dumps(echo, indent=1), encoding="utf-8")
        shutil.copyfile(self.directory / "key.pub", shared / "authorized_keys")

    def _start_container(self, node: LabNode) -> None:
        name = self.container(node)
        image = os.environ.get("MOLECULE_NODE_IMAGE") or containers.image()
        options = ["--privileged", "--systemd=always", "--stop-timeout=2", "--network=none", f"--hostname={node.name}"]
        options.append(f"--volume={self.place(node)}/shared:/opt/lab:ro")
        containers.podman("run", "--detach", "--name", name, *options, image)
        ip_batch([f"link set inner{node.number} netns {self.process(node)} name eth0"], self.fabric)
        _until(f"systemd runs in {name}", lambda: self._booted(node), 180)
        units = {"lab-network": machine_image.NETWORK_UNIT, "lab-pods": machine_image.PODS_UNIT}
        for unit, text in units.items():
            put = f"cat >/etc/systemd/system/{unit}.service"
            subprocess.run(
                ["podman", "exec", "-i", name, "sh", "-c", put],
                input=text, text=True, check=True, env=containers.environment(),
            )  # fmt: skip
        for unit in units:
            containers.podman("exec", name, "systemctl", "enable", "--now", "--quiet", f"{unit}.service")

    def _start_machine(self, node: LabNode) -> None:
        emulated = self.is_emulated(node)
        problem = qemu.missing() if emulated else uml.missing()
        if problem:
            raise LabError(problem)
        place = self.place(node)
        settings = {
            "emulated": emulated,
            "name": node.name,
            "namespace": self.namespace(node),
            "disk": str(machine_image.disk()),
            "device": node.device,
            "mac": f"02:4b:4e:01:00:{node.number:02x}",
            "shared": str(place / "shared"),
        }
        (place / "machine.json").write_text(json.dumps(settings), encoding="utf-8")
        self._background([sys.executable, "-m", "tests.molecule_support.machine", str(place)], place)

    def _booted(self, node: LabNode) -> bool:
        if node.own_kernel:
            argv = ["ssh", "-F", str(self.directory / "ssh_config"), node.address, "systemctl is-system-running"]
            done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        else:
            done = containers.podman("exec", self.container(node), "systemctl", "is-system-running", check=False)
        return done.stdout.strip() in ("running", "degraded")

    def _is_up(self, node: LabNode) -> bool:
        path = f"/run/netns/{self.fabric}"
        if node.own_kernel and not _greets(path, node.address):
            return False
        answers = (ask("TCP", pod, 8080, namespace=path, timeout=1).outcome for pod in cluster.pods(node))
        return all(outcome == "answer" for outcome in answers) and self._booted(node)


def _greets(namespace: str, address: str) -> bool:
    """Return whether an sshd answers."""
    with socket_inside(namespace, socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(2)
        try:
            client.connect((address, 22))
            return client.recv(64).startswith(b"SSH-")
        except OSError:
            return False


def _command_line(process: int) -> bytes:
    try:
        return Path("/proc", str(process), "cmdline").read_bytes()
    except OSError:
        return b""


def _guests(directory: Path) -> list[int]:
    """Return the process IDs of user-mode Linux guests whose files are in the directory."""
    mark = f"\0uml_dir={directory}/".encode()
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [number for number in numbers if mark in _command_line(number)]


def _until(what: str, condition: Callable[[], bool], timeout: float, console: Optional[Path] = None) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            found = console is not None and console.exists()
            words = console.read_text(encoding="utf-8", errors="replace") if console and found else ""
            raise LabError(f"{what}: not within {timeout:.0f} s\n{words[-3000:]}")
        time.sleep(0.2)
