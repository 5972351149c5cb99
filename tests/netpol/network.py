# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small cluster of network namespaces in which network policies are enforced on ``node1``.

``node1`` is the node under test with six pods, ``node2`` and ``node3`` are other nodes that answer for all addresses of
their pods, ``client`` is outside of the cluster, ``router`` connects them.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.conformance.wirelab.namespaces import NamespaceSet, pod_links
from tests.lab.system import ip_batch

POD_NUMBERS = tuple(range(11, 17))
NODES = {"node1": 2, "node2": 3, "node3": 4}
CLIENTS = {"client": (10, "10"), "client2": (200, "200")}
_EVERYWHERE = {
    "ipv4/conf/all/rp_filter": 0,
    "ipv4/conf/default/rp_filter": 0,
    "ipv4/icmp_ratemask": 0,
    "ipv6/icmp/ratelimit": 0,
    "ipv6/conf/all/accept_dad": 0,
    "ipv6/conf/default/accept_dad": 0,
    "ipv6/conf/default/dad_transmits": 0,
    "ipv6/conf/default/accept_ra": 0,
    "ipv4/tcp_syn_retries": 2,
}
_FORWARDING = {
    "ipv4/ip_forward": 1,
    "ipv6/conf/all/forwarding": 1,
    "ipv4/conf/all/send_redirects": 0,
    "ipv4/conf/default/send_redirects": 0,
}
_BRIDGED = {"bridge/bridge-nf-call-iptables": 1, "bridge/bridge-nf-call-ip6tables": 1}


def pod(number: int) -> str:
    """Return the name of a pod's namespace by the last part of its addresses."""
    return f"pod{number}"


class Network(NamespaceSet):
    """The namespaces of one lab. ``instance`` keeps several labs separate; ``bridge``: pods share a bridge."""

    def __init__(self, instance: str, bridge: bool = False) -> None:
        super().__init__(f"knp{instance}-", (*NODES, "client", "router", *map(pod, POD_NUMBERS)))
        self._bridge = bridge

    def __enter__(self) -> Network:
        self.create()
        for name in self.names:
            sysctls = dict(_EVERYWHERE)
            if name in NODES or name == "router":
                sysctls.update(_FORWARDING)
            if name == "node1" and self._bridge:
                sysctls.update(_BRIDGED)
            if name in ("node2", "node3"):
                # They answer for every address of their pods.
                sysctls.update({"ipv4/ip_nonlocal_bind": 1, "ipv6/ip_nonlocal_bind": 1})
            self.namespaces[name].set_sysctls(sysctls)
        ip_batch(list(self._cables()))
        for name in self.names:
            lines = [*self._links(name), *self._addresses(name, False), *self._addresses(name, True)]
            ip_batch(lines, self.full_name(name))
        return self

    def __exit__(self, *_exc: object) -> None:
        self.destroy()

    def _cables(self) -> Iterator[str]:
        ends = [(name, "eth0", "router", name) for name in (*NODES, "client")]
        ends += [(pod(number), "eth0", "node1", f"veth{number}") for number in POD_NUMBERS]
        for name, device, other, far in ends:
            yield f"link add {device} netns {self.full_name(name)} type veth peer {far} netns {self.full_name(other)}"

    def _links(self, name: str) -> Iterator[str]:
        yield "link set lo up"
        if name == "router":
            yield "link add br0 type bridge"
            for node in NODES:
                yield from (f"link set {node} master br0", f"link set {node} up")
            yield from ("link set br0 up", "link set client up")
            return
        yield "link set eth0 up"
        if name == "node1":
            yield from pod_links([f"veth{number}" for number in POD_NUMBERS], bridge=self._bridge)

    def _addresses(self, name: str, six: bool) -> Iterator[str]:
        nodes, pods, clients, length = (
            ("fd00:172:18::{}", "fd00:10:244:{}::{}", "2001:db8:113::{}", 128)
            if six
            else ("172.18.0.{}", "10.244.{}.{}", "203.0.113.{}", 32)
        )
        subnet = 64 if six else 24
        nodad = " nodad" if six else ""
        gateway = pods.format(1, 1)
        if name in NODES:
            number = NODES[name]
            yield f"addr add {nodes.format(number)}/{subnet} dev eth0{nodad}"
            yield f"route add default via {nodes.format(1)}"
            if name != "node1":
                base = pods.format(number - 1, "" if six else 0)
                yield f"route add local {base}/{subnet} dev lo"
            elif self._bridge:
                yield f"addr add {gateway}/{subnet} dev cni0{nodad}"
            else:
                for each in POD_NUMBERS:
                    yield f"addr add {gateway}/{length} dev veth{each}{nodad}"
                    yield f"route add {pods.format(1, each)}/{length} dev veth{each}"
        elif name == "client":
            for value, _suffix in CLIENTS.values():
                yield f"addr add {clients.format(value)}/{subnet} dev eth0{nodad}"
            yield f"route add default via {clients.format(1)}"
        elif name == "router":
            yield f"addr add {nodes.format(1)}/{subnet} dev br0{nodad}"
            yield f"addr add {clients.format(1)}/{subnet} dev client{nodad}"
            for number in NODES.values():
                base = pods.format(number - 1, "" if six else 0)
                yield f"route add {base}/{subnet} via {nodes.format(number)}"
        else:
            address = pods.format(1, name[3:])
            if self._bridge:
                yield f"addr add {address}/{subnet} dev eth0{nodad}"
                yield f"route add default via {gateway}"
            else:
                yield f"addr add {address}/{length} dev eth0{nodad}"
                yield f"route add {gateway} dev eth0"
                yield f"route add default via {gateway} dev eth0"
