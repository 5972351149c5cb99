# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An agent with several API servers: one is killed, stopped or cut off, and the node follows another one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any, Iterator

import pytest

from tests.apiserver.server import ApiServer
from tests.apiserver.tls import make_server_certificate, write_kubeconfig
from tests.kernel.agent_node import ROOT, AgentNode, cluster_ip, endpoint_slice, service
from tests.lab import manifests
from tests.lab.background import Background
from tests.waiting import wait_for

OWN, CONFIGURED, NAMED = "192.0.2.12", "192.0.2.13", "192.0.2.14"
NAME = "api.example.com"
SLOW = 120.0


class Servers:
    """Three API servers of one cluster: that of the kubeconfig, one that is configured, one that the cluster names."""

    def __init__(self, node: AgentNode) -> None:
        self.node = node
        names = ("localhost", "kubernetes.default.svc", NAME)
        directory = node.scratch / "several"
        node.certificates = make_server_certificate(
            directory, node.certificates.authority, ("127.0.0.1", OWN, CONFIGURED), names
        )
        node.start_api()
        write_kubeconfig(node.kubeconfig, self.url(OWN), node.certificates.authority, "test-token")
        node.node_configuration["apiServers"] = {"servers": [f"{CONFIGURED}:{node.port}"]}
        node.write_configuration()
        node.store.put(manifests.api_servers([NAMED], node.port))
        self._running: dict[str, Background] = {}
        self.changed = 0
        for address in (OWN, CONFIGURED, NAMED):
            self.begin(address)

    def url(self, address: str) -> str:
        return f"https://{address}:{self.node.port}"

    def begin(self, address: str, behind: str = "") -> None:
        """Let an address lead to the API server, or to another port of this machine."""
        port = str(self.node.port)
        command = [sys.executable, "-m", "tests.lab.front", address, port, "127.0.0.1", behind or port]
        self._running[address] = Background(command, cwd=str(ROOT))

    def signal(self, address: str, number: int) -> None:
        os.kill(self._running[address].pid, number)

    def end(self, address: str) -> None:
        self._running.pop(address).close()

    def close(self) -> None:
        for address in list(self._running):
            self.signal(address, signal.SIGCONT)
            self.end(address)

    def status(self) -> list[dict[str, Any]]:
        found = self.node.status().get("apiServers", [])
        return list(found)

    def in_use(self) -> str:
        (found,) = [item["server"] for item in self.status() if item["inUse"]]
        return str(found).partition("://")[2].rpartition(":")[0]

    def is_followed(self) -> bool:
        """Whether a change that is made now is programmed."""
        self.changed += 1
        number = self.changed
        self.node.store.put(service(number))
        self.node.store.put(endpoint_slice(number))
        wait_for(lambda: cluster_ip(number) in self.node.kernel_text(""), SLOW)
        return True

    def await_move(self, failed: str) -> float:
        """Seconds until another server than the failed one is followed."""
        began = time.monotonic()
        wait_for(lambda: self.in_use() != failed, SLOW)
        assert self.is_followed()
        (error,) = [item["lastError"] for item in self.status() if item["server"] == self.url(failed)]
        assert error
        return time.monotonic() - began


@pytest.fixture
def servers(tmp_path) -> Iterator[Servers]:
    for address in (OWN, CONFIGURED, NAMED):
        subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
    node = AgentNode(tmp_path, "nftables", api=False)
    found = Servers(node)
    yield found
    # Shown if the test fails.
    print(node.log)
    found.close()
    node.close()


def test_a_killed_server_is_left(servers):
    servers.node.start()
    expected = [(OWN, "kubeconfig"), (CONFIGURED, "configuration"), (NAMED, "cluster")]
    wait_for(lambda: len(servers.status()) == 3, 30.0)
    assert [(item["server"], item["from"]) for item in servers.status()] == [
        (servers.url(address), origin) for address, origin in expected
    ]
    assert servers.in_use() == OWN
    assert servers.node.metric("kubenode_proxy_api_servers") == 3

    for count in (1, 2):
        failed = servers.in_use()
        servers.end(failed)
        print("killed", failed, servers.await_move(failed))
        assert servers.node.metric("kubenode_proxy_api_server_changes_total") >= count
    # Only one is left, which the others do not return to by themselves.
    text = servers.node.run("status", "--control", str(servers.node.scratch / "agent.sock")).stdout
    assert f"API server: {servers.url(servers.in_use())}: in use, named by the " in text
    assert servers.node.log.count("using another API server") >= 2


def test_a_stopped_server_is_left_although_its_connections_are_open(servers):
    servers.node.start()
    servers.signal(OWN, signal.SIGSTOP)
    print("stopped", servers.await_move(OWN))


@pytest.mark.full
def test_a_server_that_is_cut_off_is_left(servers):
    servers.node.start()
    subprocess.run(["nft", "-f", "-"], input=CUT_OFF, text=True, check=True)
    print("cut off", servers.await_move(OWN))


CUT_OFF = f"""
table ip cut-off {{
  chain output {{
    type filter hook output priority 0;
    ip daddr {OWN} drop
    ip saddr {OWN} drop
  }}
}}
"""


def test_the_agent_starts_while_the_server_of_its_kubeconfig_is_dead(servers):
    servers.end(OWN)
    servers.node.start()
    assert servers.in_use() == CONFIGURED
    assert servers.is_followed()


def test_a_named_server_without_the_certificate_of_an_api_server_gets_no_request(servers):
    """The certificate of a kubelet has its address, and the same authority may have signed it."""
    directory = servers.node.scratch / "kubelet"
    certificates = make_server_certificate(directory, servers.node.certificates.authority, (NAMED,))
    other = ApiServer(servers.node.store, certificates, address=("127.0.0.1", 0))
    servers.end(NAMED)
    servers.begin(NAMED, other.url.rpartition(":")[2])
    servers.node.node_configuration["apiServers"] = {}
    servers.node.write_configuration()
    servers.node.start()
    wait_for(lambda: len(servers.status()) == 2, 30.0)
    servers.end(OWN)
    with contextlib.closing(other):
        refusal = "certificate is not valid for 'kubernetes.default.svc'"
        wait_for(lambda: any(refusal in item["lastError"] for item in servers.status()), SLOW)
        servers.begin(OWN)
        assert servers.is_followed() and servers.in_use() == OWN
        assert other.requests == []


def test_a_service_cannot_replace_the_api_servers(servers):
    """Otherwise the agent's own connections would be redirected, and it would never learn of the Service's end."""
    node = servers.node
    node.start()
    wait_for(lambda: len(servers.status()) == 3, 30.0)
    node.store.put(service(7, externalIPs=[OWN, CONFIGURED, NAMED, "198.51.100.7"], ports=(node.port, 80)))
    node.store.put(endpoint_slice(7, ports=(node.port, 80)))
    wait_for(lambda: cluster_ip(7) in node.kernel_text(""), SLOW)

    for address in (OWN, CONFIGURED, NAMED):
        assert f"{address} . tcp . {node.port} " not in node.kernel_text("")
        assert f"{address} . tcp . 80 " in node.kernel_text("")
        assert any(f"{address}:{node.port}/TCP is claimed" in line for line in node.status()["conflicts"])
    assert f"198.51.100.7 . tcp . {node.port} " in node.kernel_text("")
    assert not node.differences()["changed"]

    for address in (OWN, CONFIGURED, NAMED):
        servers.end(address)
        servers.begin(address)
    node.store.delete("Service", "default", "svc-7")
    wait_for(lambda: cluster_ip(7) not in node.kernel_text(""), SLOW)


def test_a_service_cannot_replace_an_api_server_that_is_known_by_name(servers):
    node = servers.node
    hosts = node.scratch / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{OWN} {NAME}\n")
    own_hosts = 'mount --bind "$0" /etc/hosts && exec "$@"'
    node.prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", own_hosts, str(hosts)]
    write_kubeconfig(node.kubeconfig, f"https://{NAME}:{node.port}", node.certificates.authority, "test-token")
    node.node_configuration["apiServers"] = {}
    node.write_configuration()
    node.store.delete("EndpointSlice", "default", "kubernetes")
    node.store.put(service(7, externalIPs=[OWN, "198.51.100.7"], ports=(node.port,)))
    node.store.put(endpoint_slice(7, ports=(node.port,)))
    node.start()
    wait_for(lambda: f"198.51.100.7 . tcp . {node.port} " in node.kernel_text(""), SLOW)
    wait_for(lambda: f"{OWN} . tcp . {node.port} " not in node.kernel_text(""), SLOW)
    assert any(f"{OWN}:{node.port}/TCP is claimed" in line for line in node.status()["conflicts"])
    assert not node.differences()["changed"]

    servers.end(OWN)
    servers.begin(OWN)
    node.store.delete("Service", "default", "svc-7")
    wait_for(lambda: cluster_ip(7) not in node.kernel_text(""), SLOW)
