# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node for tests of the agent: the real process against the test API server, in the network namespace of the test."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.lab import manifests
from tests.lab.manifests import Object
from tests.lab.ports import free_port
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
NODE = "node1"
# With the agent's real retry delays 500 answers would take an hour.
HASTY = """
import sys
from module_utils.agent.threads import supervision
supervision.FIRST_PAUSE_SECONDS, supervision.LONGEST_PAUSE_SECONDS = 0.02, 0.1
from module_utils.command.cli import main
sys.exit(main())
"""


def service(number: int, ports: Sequence[int] = (80,), namespace: str = "default", **spec: Any) -> Object:
    """Return Service ``svc-NUMBER`` with the cluster IP 10.96.x.y that follows from the number."""
    listed = [manifests.port(port, name=f"p{port}") for port in ports]
    return manifests.service(f"svc-{number}", cluster_ip(number), listed, namespace=namespace, **spec)


def cluster_ip(number: int) -> str:
    """Return the cluster IP of a numbered Service."""
    return f"10.{96 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def endpoint_ip(service_number: int, index: int) -> str:
    """Return the address of endpoint ``index`` of a numbered Service."""
    number = service_number * 8 + index + 1
    return f"10.{244 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def endpoint_slice(
    number: int, count: int = 2, ports: Sequence[int] = (80,), target: int = 8080, first: int = 0, protocol: str = "TCP"
) -> Object:
    """Return an EndpointSlice of Service ``svc-NUMBER`` with ``count`` ready endpoints."""
    endpoints = [manifests.endpoint(endpoint_ip(number, index), "node2") for index in range(first, first + count)]
    listed = [manifests.port(target, name=f"p{port}", protocol=protocol) for port in ports]
    return manifests.endpoint_slice(f"svc-{number}", endpoints, listed, name=f"svc-{number}-a")


def node_object(**more: Any) -> Object:
    """Return the Node object of the node under test."""
    return manifests.node(NODE, "192.0.2.1", "10.244.1.0/24", **{"metadata": {"labels": {}}, **more})


class AgentNode:
    """An API server with a store, and an agent process that tests start, stop and kill.

    ``mode``: of ipvs mode may name the filter backend after a blank, ``ipvs nftables``.
    """

    def __init__(self, scratch: Path, mode: str, variant: str = "", min_sync: str = "10ms", api: bool = True) -> None:
        #: Additional command-line options of the next start.
        self.options: list[str] = []
        self.scratch = scratch
        self.mode, _space, filter_backend = mode.partition(" ")
        self.kernel_variant = variant
        self.store = Store()
        self.store.put(node_object())
        self.certificates = make_certificates(scratch / "tls")
        self.port = free_port()
        self.api: Optional[ApiServer] = None
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.starts = 0
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT / "plugins")}
        #: A wrapper command and a ``preexec_fn`` that start the agent and its children with fewer privileges.
        self.prefix: list[str] = []
        self.before_exec: Optional[Callable[[], None]] = None
        if variant:
            self._choose_variant(variant)
        if api:
            self.start_api()
        self.kubeconfig = write_kubeconfig(
            scratch / "kubeconfig", f"https://127.0.0.1:{self.port}", self.certificates.authority, "test-token"
        )
        self.metrics_port, self.health_port = free_port(), free_port()
        period = {"minSyncPeriod": min_sync, "syncPeriod": "30s"}
        self.configuration: Object = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": self.mode,
            "hostnameOverride": NODE,
            "clusterCIDR": "10.244.0.0/16",
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "iptables": period,
            "ipvs": period,
            "nftables": period,
            "healthzBindAddress": f"127.0.0.1:{self.health_port}",
            "metricsBindAddress": f"127.0.0.1:{self.metrics_port}",
        }
        #: The second document of the configuration. It never names the host's own directory of static Services.
        self.services = scratch / "services.d"
        self.node_configuration: Object = {
            "apiVersion": "kubenode.proxy/v1alpha1",
            "kind": "NodeProxyConfiguration",
            "staticServices": {"directory": str(self.services)},
            **({"ipvsFilterBackend": filter_backend} if filter_backend else {}),
        }
        self.write_configuration()

    def _choose_variant(self, variant: str) -> None:
        """Prepend to PATH a directory in which iptables and its companions are of one variant."""
        folder = self.scratch / "bin"
        folder.mkdir(exist_ok=True)
        for family in ("iptables", "ip6tables"):
            for suffix in ("", "-save", "-restore"):
                (folder / f"{family}{suffix}").symlink_to(f"/usr/sbin/{family}-{variant}{suffix}")
        self.environment["PATH"] = f"{folder}:{self.environment['PATH']}"

    def write_configuration(self, **changes: Any) -> None:
        """Write the configuration file again with some fields changed."""
        self.configuration.update(changes)
        documents = (self.configuration, self.node_configuration)
        (self.scratch / "config.yaml").write_text("\n---\n".join(map(json.dumps, documents)))

    def start_api(self) -> None:
        """Start the API server, on the same port as before."""
        self.api = ApiServer(self.store, self.certificates, address=("127.0.0.1", self.port), bookmark_seconds=2.0)

    def put_service(self, number: int, endpoints: int = 2) -> None:
        """Store a Service and its endpoints."""
        self.store.put(endpoint_slice(number, endpoints))
        self.store.put(service(number))

    def stop_api(self) -> None:
        """Stop the API server: connections are refused."""
        if self.api is not None:
            self.api.close()
            self.api = None

    def _command(self, *words: str) -> list[str]:
        return [*self.prefix, sys.executable, "-m", "module_utils.command.cli", *words]

    @property
    def log(self) -> str:
        """Return the log of the last start."""
        return (self.scratch / f"agent-{self.starts}.log").read_text()

    def start(self, wait: bool = True) -> None:
        """Start the agent; with ``wait``, return after its first sync."""
        self.starts += 1
        with open(self.scratch / f"agent-{self.starts}.log", "wb") as log:
            self.process = subprocess.Popen(
                self._command(
                    *("run", "--config", str(self.scratch / "config.yaml"), "--kubeconfig", str(self.kubeconfig)),
                    *("--state-directory", str(self.scratch / "run"), "--cache", str(self.scratch / "cache.gz")),
                    *("--control", str(self.scratch / "agent.sock"), "--drain-file", str(self.scratch / "drain.json")),
                    "-v",
                    *self.options,
                ),
                env=self.environment,
                stdout=log,
                stderr=log,
                preexec_fn=self.before_exec,
            )
        if wait:

            def synced() -> bool:
                """Return whether the cluster is served, or static Services. Raises AssertionError if it has exited."""
                if self.process is not None and self.process.poll() is not None:
                    raise AssertionError(f"the agent has ended:\n{self.log}")
                status = self.status()
                served = status.get("clusterKnown") or status.get("staticServices")
                return bool(served) and status["syncs"] > 0

            wait_for(synced, 300.0, 0.05)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the agent a signal and return its exit status."""
        if self.process is None:
            return 0
        self.process.send_signal(number)
        status = self.process.wait(30)
        self.process = None
        return status

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the agent's process with SIGSTOP, and continue it afterwards."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop the agent and the API server."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.stop_api()

    def run(self, *words: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a subcommand of the node command beside the agent, with the agent's configuration."""
        return subprocess.run(
            self._command(*words),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            preexec_fn=self.before_exec,
        )

    @property
    def places(self) -> tuple[str, ...]:
        """Return the options for the directories of the agent and of saved states, not those of the host."""
        return ("--state-directory", str(self.scratch / "run"), "--history", str(self.scratch / "history"))

    def converge(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run one convergence with the agent's configuration and API server."""
        settings = ("--config", str(self.scratch / "config.yaml"), "--kubeconfig", str(self.kubeconfig))
        return self.run("converge", *settings, *self.places, *options)

    def status(self) -> Object:
        """Return the agent's status document; empty if it does not answer."""
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(30)
                sock.connect(str(self.scratch / "agent.sock"))
                sock.sendall(b'{"command":"status"}\n')
                data = b""
                while not data.endswith(b"\n"):
                    part = sock.recv(65536)
                    if not part:
                        return {}
                    data += part
        except OSError:
            return {}
        return dict(json.loads(data))

    def fetch(self, path: str, port: int = 0) -> str:
        """Return the body of a GET on the metrics port, or on ``port``."""
        address = f"http://127.0.0.1:{port or self.metrics_port}{path}"
        done = subprocess.run(["curl", "-s", "-m", "5", address], capture_output=True, text=True, check=False)
        return done.stdout

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        pattern = re.compile(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", re.MULTILINE)
        return sum(float(match.group(1)) for match in pattern.finditer(self.fetch("/metrics")))

    def resident_mebibytes(self) -> float:
        """Return the agent's resident memory in MiB."""
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
        assert found is not None
        return int(found.group(1)) / 1024

    def processor_seconds(self) -> float:
        """Return the processor time the agent and its children have used so far, in seconds."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(value) for value in fields[11:15]) / os.sysconf("SC_CLK_TCK")

    def differences(self, timeout: float = 120.0) -> Object:
        """Return the differences that a one-shot check against the API server reports."""
        done = self.run(
            *("diff", "--config", str(self.scratch / "config.yaml"), "--kubeconfig", str(self.kubeconfig)),
            *("--state-directory", str(self.scratch / "run"), "-o", "json"),
            timeout=timeout,
        )
        assert done.returncode in (0, 3), done.stderr
        return dict(json.loads(done.stdout))

    def kernel_text(self, variant: str) -> str:
        """Return all IPv4 rules as the mode's own tool prints them."""
        command = ["nft", "list", "ruleset"] if self.mode == "nftables" else [f"iptables-{variant}-save"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class HastyNode(AgentNode):
    """An agent with short retry delays."""

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-c", HASTY, *words]


@contextlib.contextmanager
def service_manager(node: AgentNode) -> Iterator[Callable[[], str]]:
    """Receive what the agent sends to the service manager; the result returns all of it so far."""
    path = str(node.scratch / "notify")
    received: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(path)
        sock.setblocking(False)
        node.environment["NOTIFY_SOCKET"] = path

        def sent() -> str:
            with contextlib.suppress(BlockingIOError):
                while True:
                    received.append(sock.recv(4096).decode())
            return "\n".join(received)

        yield sent
