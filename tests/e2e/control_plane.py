# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The control plane: etcd and Kubernetes' own programs in a network namespace, to which the nodes are connected."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import subprocess
import sys
import urllib.parse
from functools import partial
from pathlib import Path
from typing import Any, Sequence

from tests.apiserver.tls import make_certificates, make_client_certificate, write_kubeconfig
from tests.lab.background import Background
from tests.lab.namespaces import ROOT, Namespaces
from tests.lab.system import LabError, socket_inside

from .addresses import API_SERVER, CONTROL, DNS, DOMAIN, PODS, SERVICES, node_addresses, pod_networks
from .binaries import Binaries

#: The bridge to which the nodes are connected.
BRIDGE = "nodes"
#: Users of the static token file (Kubernetes: "Static token file integration") with their groups. The names are those
#: for which the API server makes roles by itself.
_USERS = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "kube-proxy": ("system:kube-proxy", ""),
}


def _user_of(node: str) -> dict[str, tuple[str, str]]:
    return {node: (f"system:node:{node}", "system:nodes")}


def _unverified() -> ssl.SSLContext:
    """Return a context for servers whose certificates only they know, which is enough to see whether they answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class ControlPlane:
    """A control plane for the nodes of these names, with its logs in ``logs``; it answers once constructed.

    ``directory`` has the certificates and, by :meth:`kubeconfig`, a kubeconfig of each user.
    """

    def __init__(self, binaries: Binaries, directory: Path, logs: Path, nodes: Sequence[str]) -> None:
        self._binaries = binaries
        self._logs = logs
        self.directory = directory
        self._closing = contextlib.ExitStack()
        try:
            self.namespaces = Namespaces()
            self._closing.callback(self.namespaces.close)
            self._make_network(len(nodes))
            self._make_access(nodes)
            self._start()
            self._create_nodes(nodes)
            self._serve_names()
        except BaseException:
            self.close()
            raise

    def enter(self) -> list[str]:
        """Return the beginning of a command line that runs beside the control plane."""
        return self.namespaces.enter(ROOT)

    def kubeconfig(self, user: str) -> Path:
        """Return the kubeconfig of a user: admin, controller-manager, scheduler, kube-proxy, or a node's name."""
        return self.directory / f"{user}.kubeconfig"

    def kubectl(self, *arguments: str, text: str = "") -> str:
        """Run kubectl as an administrator and return its output. Raises LabError."""
        command = [self._binaries.path("kubectl"), f"--kubeconfig={self.kubeconfig('admin')}", *arguments]
        done = self.namespaces.execute(command, ROOT, text)
        if done.returncode:
            raise LabError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def create(self, items: Sequence[dict[str, Any]]) -> None:
        """Create objects. They are not compared with the server's schema, which some builds of it do not have."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(items)}
        self.kubectl("create", "--validate=false", "--filename=-", text=json.dumps(listed))

    def run(self, *command: str, text: str = "") -> None:
        """Run a program beside the control plane. Raises LabError."""
        done = self.namespaces.execute(command, ROOT, text)
        if done.returncode:
            raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")

    def _make_network(self, nodes: int) -> None:
        lines = [f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up"]
        lines += [f"address add {CONTROL[0]}/24 dev {BRIDGE}", f"address add {CONTROL[1]}/64 dev {BRIDGE} nodad"]
        for number in range(1, nodes + 1):
            for address, network in zip(node_addresses(number), pod_networks(number)):
                lines.append(f"route add {network} via {address} dev {BRIDGE}")
        self.run("ip", "-batch", "-", text="\n".join(lines) + "\n")
        # So that addresses that nothing serves are refused at once, as by a router.
        forwarding = ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        self.run("sysctl", "--quiet", "--write", *forwarding)

    def _make_access(self, nodes: Sequence[str]) -> None:
        certificates = make_certificates(self.directory, addresses=(*CONTROL, "127.0.0.1", "10.96.0.1"))
        make_client_certificate(self.directory, "kubelet-client", "system:masters")
        # The key of ServiceAccounts' tokens needs no certificate, but is made by the same function.
        make_client_certificate(self.directory, "service-accounts")
        users = dict(_USERS)
        for node in nodes:
            users.update(_user_of(node))
        lines = []
        for name, (user, groups) in users.items():
            token = f"{name}-token"
            lines.append(f'{token},{user},{name},"{groups}"')
            write_kubeconfig(self.kubeconfig(name), API_SERVER, certificates.authority, token)
        (self.directory / "tokens").write_text("\n".join(lines) + "\n", encoding="ascii")

    def _file(self, name: str) -> str:
        return str(self.directory / name)

    def _answers(self, url: str, _pid: int) -> bool:
        """Whether the server of a URL beside the control plane answers that all is well."""
        place = urllib.parse.urlsplit(url)
        address = (str(place.hostname), int(place.port or 0))
        connection = http.client.HTTPConnection(*address)
        try:
            with socket_inside(
                f"/proc/{self.namespaces.holder.pid}/ns/net", socket.AF_INET, socket.SOCK_STREAM
            ) as sock:
                sock.settimeout(30)
                sock.connect(address)
                connection.sock = _unverified().wrap_socket(sock) if place.scheme == "https" else sock
                connection.request("GET", place.path, headers={"Authorization": "Bearer admin-token"})
                return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _begin(self, program: str, *options: str, answers: str) -> None:
        """Start a program and wait until it answers at this URL."""
        command = [*self.enter(), self._binaries.path(program), *options]
        ready, log = partial(self._answers, answers), self._logs / f"{program}.log"
        self._closing.callback(Background(command, ready=ready, log=log, timeout=300).close)

    def _start(self) -> None:
        self._begin(
            "etcd", f"--data-dir={self._file('etcd')}", "--unsafe-no-fsync", answers="http://127.0.0.1:2379/health"
        )
        self._begin(
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={CONTROL[0]}",
            f"--service-cluster-ip-range={','.join(SERVICES)}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            "--anonymous-auth=true",
            f"--token-auth-file={self._file('tokens')}",
            f"--client-ca-file={self._file('ca.crt')}",
            f"--tls-cert-file={self._file('server.crt')}",
            f"--tls-private-key-file={self._file('server.key')}",
            f"--kubelet-client-certificate={self._file('kubelet-client.crt')}",
            f"--kubelet-client-key={self._file('kubelet-client.key')}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
            f"--service-account-key-file={self._file('service-accounts.crt')}",
            f"--service-account-signing-key-file={self._file('service-accounts.key')}",
            answers=f"{API_SERVER}/readyz",
        )
        self._begin(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig('controller-manager')}",
            f"--authentication-kubeconfig={self.kubeconfig('controller-manager')}",
            f"--authorization-kubeconfig={self.kubeconfig('controller-manager')}",
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={self._file('service-accounts.key')}",
            f"--root-ca-file={self._file('ca.crt')}",
            f"--cluster-cidr={','.join(PODS)}",
            "--allocate-node-cidrs=false",
            answers="https://127.0.0.1:10257/healthz",
        )
        self._begin(
            "kube-scheduler",
            f"--kubeconfig={self.kubeconfig('scheduler')}",
            "--leader-elect=false",
            answers="https://127.0.0.1:10259/healthz",
        )

    def _create_nodes(self, nodes: Sequence[str]) -> None:
        """Create the Nodes with the networks of their pods; the kubelets find them when they register."""
        items = []
        for number, name in enumerate(nodes, 1):
            networks = pod_networks(number)
            spec = {"podCIDR": networks[0], "podCIDRs": list(networks)}
            items.append({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": spec})
        self.create(items)

    def _serve_names(self) -> None:
        """Serve the cluster's names beside the control plane, behind a Service: lookups pass the proxy under test."""
        command = [*self.enter(), sys.executable, "-m", "tests.e2e.dns"]
        command += ["--kubeconfig", str(self.kubeconfig("admin")), "--domain", DOMAIN]
        for address in CONTROL:
            command += ["--listen", address]
        self._closing.callback(Background(command, log=self._logs / "dns.log").close)
        labels = {"kubernetes.io/service-name": "kube-dns"}
        ports: list[dict[str, Any]] = [
            {"name": "dns", "protocol": "UDP", "port": 53},
            {"name": "dns-tcp", "protocol": "TCP", "port": 53},
        ]
        spec = {"clusterIP": DNS[0], "clusterIPs": list(DNS), "ipFamilyPolicy": "RequireDualStack", "ports": ports}
        items: list[dict[str, Any]] = [
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}},
                "spec": spec,
            }
        ]
        for family, address in zip(("IPv4", "IPv6"), CONTROL):
            items.append(
                {
                    "apiVersion": "discovery.k8s.io/v1",
                    "kind": "EndpointSlice",
                    "metadata": {"name": f"kube-dns-{family.lower()}", "namespace": "kube-system", "labels": labels},
                    "addressType": family,
                    "ports": ports,
                    "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
                }
            )
        self.create(items)

    def describe(self) -> str:
        """Return what the nodes and pods of the cluster look like now, for a failure's message."""
        command = [self._binaries.path("kubectl"), f"--kubeconfig={self.kubeconfig('admin')}", "describe", "nodes"]
        done: subprocess.CompletedProcess[str] = self.namespaces.execute(command, ROOT)
        return done.stdout + done.stderr

    def close(self) -> None:
        """End all programs and remove the network."""
        self._closing.close()
