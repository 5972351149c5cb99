# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""IPv6 link-local addresses, which every pod has and no object names: policies hold for them, on interfaces of pods."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess

import pytest

from tests.kernel.policy_node import PORTS, TABLE, bridge_port, elements, policy, policy_node
from tests.lab.system import ip_batch
from tests.netpol import cases
from tests.netpol.network import Network
from tests.netpol.running import Node
from tests.waiting import wait_for

PORT = 9000
WEB, DB, OTHER, FOURTH = "pod11", "pod12", "pod13", "pod14"
GLOBAL = {name: f"fd00:10:244:1::{name[3:]}" for name in (WEB, DB, OTHER, FOURTH)}


class LinkLab:
    """The small cluster with a listener in each namespace, and connections over link-local addresses."""

    def __init__(self, directory, bridge):
        self.network = Network(f"l{os.getpid()}", bridge)
        self.network.__enter__()
        self.node = Node(self.network, directory, "nftables")
        self._listeners = []
        for namespace in self.network.namespaces.values():
            listener = namespace.socket(socket.AF_INET6, socket.SOCK_STREAM)
            listener.bind(("::", PORT))
            listener.listen(64)
            self._listeners.append(listener)

    def close(self):
        for listener in self._listeners:
            listener.close()
        self.network.destroy()

    def link_local(self, name, device):
        """Return the link-local address of a device."""
        listed = subprocess.run(
            ["ip", "-n", self.network.full_name(name), "-6", "-j", "addr", "show", "dev", device, "scope", "link"],
            capture_output=True,
            text=True,
            check=True,
        )
        # Other devices, and their addresses, are listed as empty objects.
        addresses = [item for each in json.loads(listed.stdout) for item in each.get("addr_info", ())]
        return next(item["local"] for item in addresses if "local" in item)

    def connects(self, name, device, address, source=""):
        """Return whether a TCP connection from a namespace through a device is accepted."""
        namespace = self.network.namespaces[name]
        with namespace.inside():
            number = socket.if_nametoindex(device)
        with contextlib.closing(namespace.socket(socket.AF_INET6, socket.SOCK_STREAM)) as made:
            made.settimeout(1.5)
            if source:
                made.bind((source, 0, 0, number))
            try:
                made.connect((address, PORT, 0, number if address.startswith("fe80") else 0))
            except TimeoutError:
                return False
            return True

    def converge(self, *policies, **options):
        """Enforce only these policies."""
        objects = [item for key, item in cases.steps("ip-block")[0].objects.items() if key[0] != "NetworkPolicy"]
        self.node.converge([*objects, *policies])

    def interfaces(self, side):
        """Return the interfaces on which the table denies link-local traffic."""
        listed = self.node.inside("nft", "list", "set", *TABLE.split(), f"links-{side}")
        return set(re.findall('"([^"]+)"', listed))

    def forget_neighbours(self):
        """Let every namespace resolve all addresses again."""
        for name in self.network.names:
            ip_batch(["neigh flush all"], self.network.full_name(name))


@pytest.fixture
def lab(tmp_path):
    def made(bridge=False):
        opened.append(LinkLab(tmp_path, bridge))
        return opened[-1]

    opened = []
    yield made
    for each in opened:
        each.close()


def deny(namespace, app, *directions):
    metadata = {"namespace": namespace, "name": f"{app}-{'-'.join(directions).lower()}"}
    spec = {"podSelector": {"matchLabels": {"app": app}}, "policyTypes": list(directions)}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}


def test_a_pod_whose_egress_is_denied_does_not_reach_its_node(lab):
    link = lab()
    link.converge(deny("shop", "web", "Egress"), deny("shop", "db", "Ingress"))
    node = {name: link.link_local("node1", f"veth{name[3:]}") for name in (WEB, DB, OTHER)}
    assert link.interfaces("out") == {"veth11"} and link.interfaces("in") == set()
    assert not link.connects(WEB, "eth0", node[WEB])
    # With its link-local address, to a global one of the node.
    assert not link.connects(WEB, "eth0", "fd00:172:18::2", source=link.link_local(WEB, "eth0"))
    assert link.connects(DB, "eth0", node[DB]) and link.connects(OTHER, "eth0", node[OTHER])
    # What the node sends, its uplink, and neighbour discovery.
    link.forget_neighbours()
    for name in (WEB, DB, OTHER):
        device = f"veth{name[3:]}"
        assert link.connects("node1", device, link.link_local(name, "eth0"))
        assert link.connects("node1", device, GLOBAL[name])
    assert link.connects("router", "br0", link.link_local("node1", "eth0"))
    assert link.connects("node1", "eth0", link.link_local("router", "br0"))


def test_pods_on_a_bridge_do_not_reach_each_other(lab):
    link = lab(bridge=True)
    address = {name: link.link_local(name, "eth0") for name in (WEB, DB, OTHER, FOURTH)}
    node = link.link_local("node1", "cni0")
    link.converge(deny("shop", "web", "Egress"))
    assert link.interfaces("out") == {"cni0"} and link.interfaces("in") == set()
    assert not link.connects(WEB, "eth0", node) and not link.connects(WEB, "eth0", address[OTHER])
    assert not link.connects(WEB, "eth0", GLOBAL[OTHER], source=address[WEB])
    assert not link.connects(WEB, "eth0", address[OTHER], source=GLOBAL[WEB])
    link.converge(deny("shop", "db", "Ingress"))
    assert link.interfaces("in") == {"cni0"} and link.interfaces("out") == set()
    assert not link.connects(OTHER, "eth0", address[DB])
    assert not link.connects(OTHER, "eth0", address[DB], source=GLOBAL[OTHER])
    assert link.connects(OTHER, "eth0", node) and link.connects(OTHER, "eth0", GLOBAL[FOURTH])
    link.converge(deny("shop", "web", "Egress"), deny("shop", "db", "Ingress"))
    link.forget_neighbours()
    for name in (WEB, DB, OTHER):
        assert link.connects("node1", "cni0", address[name]) and link.connects("node1", "cni0", GLOBAL[name])
    assert link.connects(OTHER, "eth0", GLOBAL[FOURTH]), "neighbour discovery between pods"
    assert link.connects("router", "br0", link.link_local("node1", "eth0"))
    link.converge()
    assert link.connects(WEB, "eth0", node) and link.connects(OTHER, "eth0", address[DB])


def test_a_rule_that_allows_everything_allows_it_for_link_local_addresses(lab):
    link = lab()
    allowed = deny("shop", "web", "Egress")
    allowed["spec"]["egress"] = [{}]
    link.converge(allowed, deny("bank", "web", "Egress"))
    assert link.interfaces("out") == {"veth13"}
    assert link.connects(WEB, "eth0", link.link_local("node1", "veth11"))


def test_an_address_of_the_node_does_not_help(lab):
    """A pod that may add addresses sends with that of the node, from which others accept everything."""
    link = lab(bridge=True)
    node = link.link_local("node1", "cni0")
    link.converge(deny("shop", "db", "Ingress"))
    ip_batch([f"addr add {node}/64 dev eth0 nodad"], link.network.full_name(OTHER))
    listener = link.network.namespaces[DB].socket(socket.AF_INET6, socket.SOCK_DGRAM)
    listener.bind(("::", PORT))
    sender = link.network.namespaces[OTHER].socket(socket.AF_INET6, socket.SOCK_DGRAM)
    with contextlib.closing(listener), contextlib.closing(sender), link.network.namespaces[OTHER].inside():
        number = socket.if_nametoindex("eth0")
        sender.bind((node, 0, 0, number))
        sender.sendto(b"forged", (link.link_local(DB, "eth0"), PORT, 0, number))
        listener.settimeout(1.0)
        with pytest.raises(TimeoutError):
            listener.recv(10)


def test_multicast_of_the_node_returns_to_it(lab):
    link = lab(bridge=True)
    link.converge(deny("shop", "web", "Egress"))
    namespace = link.network.namespaces["node1"]
    made = namespace.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    with contextlib.closing(made):
        with namespace.inside():
            number = socket.if_nametoindex("cni0")
        group = socket.inet_pton(socket.AF_INET6, "ff02::fb") + number.to_bytes(4, "little")
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
        made.bind(("::", 5353))
        made.settimeout(2.0)
        made.sendto(b"hello", ("ff02::fb", 5353, 0, number))
        assert made.recv(10) == b"hello"


@pytest.mark.parametrize(
    "line",
    [
        "link add link eth0 name up0 type macvlan mode bridge",
        "route add 192.0.2.0/24 via 10.244.1.12 dev cni0",
        "route add default table 100 nexthop via 10.244.1.12 dev cni0 nexthop via 172.18.0.1 dev eth0",
    ],
    ids=["another port", "a gateway", "a gateway of another table"],
)
def test_a_bridge_that_is_an_uplink_is_left_alone(lab, line):
    link = lab(bridge=True)
    lines = [line, "link set up0 master cni0"] if "up0" in line else [line]
    ip_batch(lines, link.network.full_name("node1"))
    link.converge(deny("shop", "web", "Egress"), deny("shop", "db", "Ingress"))
    assert link.interfaces("out") == link.interfaces("in") == set()
    assert link.connects(WEB, "eth0", link.link_local("node1", "cni0"))


def test_destinations_that_are_not_judged_are_reached(lab, tmp_path):
    link = lab()
    document = {
        "apiVersion": "kubenode.proxy/v1alpha1",
        "kind": "NodeProxyConfiguration",
        "networkPolicy": {"enabled": True, "egressExemptCIDRs": ["fe80::/10"]},
    }
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text(encoding="utf-8") + f"---\n{json.dumps(document)}\n")
    link.node.environment.pop("LAB_NETWORK_POLICY", None)
    link.converge(deny("shop", "web", "Egress"))
    assert link.interfaces("out") == {"veth11"}
    assert link.connects(WEB, "eth0", link.link_local("node1", "veth11"))


def test_the_agent_looks_soon_for_a_port_that_it_did_not_find(tmp_path):
    """Nothing announces an address in the network namespace of a pod."""
    node = policy_node(tmp_path, networkPolicy={"enabled": True})
    with contextlib.closing(node), bridge_port("", "10.244.0.1/24") as pod:
        node.start()
        wait_for(lambda: '"cni0"' in elements("pod-links"), 30)
        assert "10.244.0.5" not in elements("bound4", PORTS)
        ip_batch(["addr add 10.244.0.5/24 dev eth0", "link set eth0 up"], pod)
        wait_for(lambda: '"port0" . 10.244.0.5' in elements("bound4", PORTS), 20)


def test_the_agent_follows_the_interfaces_of_pods(tmp_path):
    """Also of a pod that gets another one with the same address, as after the node has booted."""
    node = policy_node(tmp_path, networkPolicy={"enabled": True})
    node.store.put(policy("out", podSelector={}, policyTypes=["Egress"]))
    try:
        node.start()
        wait_for(lambda: "10.244.0.5" in elements("isolated-out4"), 30)
        for name in ("first", "second"):
            ip_batch([f"link add {name} type veth peer name {name}-p", f"link set {name} up", f"link set {name}-p up"])
            ip_batch([f"route add 10.244.0.5/32 dev {name}"])
            wait_for(lambda name=name: f'"{name}"' in elements("links-out"), 30)
            assert f'"{name}"' in elements("pod-links") and f'"{name}" . 10.244.0.5' in elements("bound4")
            ip_batch([f"link del {name}"])
            wait_for(lambda name=name: f'"{name}"' not in elements("links-out"), 30)
    finally:
        node.close()
