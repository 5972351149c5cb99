# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ipsets of ipvs mode: names, types and the comments of the rules that use them (kube-proxy 1.36)."""

from __future__ import annotations

from typing import NamedTuple, Optional

from ...base.addresses import IPV6
from ...configuration.behaviour import KUBE_PROXY, Behaviour
from .model import SetDefinition, SetElementKey

LOOP_BACK = "KUBE-LOOP-BACK"
CLUSTER_IP = "KUBE-CLUSTER-IP"
EXTERNAL_IP = "KUBE-EXTERNAL-IP"
EXTERNAL_IP_LOCAL = "KUBE-EXTERNAL-IP-LOCAL"
LOAD_BALANCER = "KUBE-LOAD-BALANCER"
LOAD_BALANCER_LOCAL = "KUBE-LOAD-BALANCER-LOCAL"
LOAD_BALANCER_FW = "KUBE-LOAD-BALANCER-FW"
LOAD_BALANCER_SOURCE_CIDR = "KUBE-LOAD-BALANCER-SOURCE-CIDR"
LOAD_BALANCER_SOURCE_IP = "KUBE-LOAD-BALANCER-SOURCE-IP"
NODE_PORT_TCP = "KUBE-NODE-PORT-TCP"
NODE_PORT_LOCAL_TCP = "KUBE-NODE-PORT-LOCAL-TCP"
NODE_PORT_UDP = "KUBE-NODE-PORT-UDP"
NODE_PORT_LOCAL_UDP = "KUBE-NODE-PORT-LOCAL-UDP"
NODE_PORT_SCTP = "KUBE-NODE-PORT-SCTP-HASH"
NODE_PORT_LOCAL_SCTP = "KUBE-NODE-PORT-LOCAL-SCTP-HASH"
HEALTH_CHECK_NODE_PORT = "KUBE-HEALTH-CHECK-NODE-PORT"
IPVS_IPS = "KUBE-IPVS-IPS"
INTERNAL_DROPPED = "KUBE-INTERNAL-NO-LOCAL"
EXTERNAL_DROPPED = "KUBE-EXTERNAL-NO-LOCAL"

# The kernel allows 31 characters and a zero byte.
_LONGEST_NAME = 31

HASH_IP = "hash:ip"
HASH_IP_PORT = "hash:ip,port"
HASH_IP_PORT_IP = "hash:ip,port,ip"
HASH_IP_PORT_NET = "hash:ip,port,net"
BITMAP_PORT = "bitmap:port"


class KnownSet(NamedTuple):
    """Type and rule comment of one of the sets."""

    type: str
    comment: str


def _local(what: str) -> str:
    return f"Kubernetes {what} with externalTrafficPolicy=local"


SETS: dict[str, KnownSet] = {
    LOOP_BACK: KnownSet(HASH_IP_PORT_IP, "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose"),
    CLUSTER_IP: KnownSet(HASH_IP_PORT, "Kubernetes service cluster ip + port for masquerade purpose"),
    EXTERNAL_IP: KnownSet(HASH_IP_PORT, "Kubernetes service external ip + port for masquerade and filter purpose"),
    EXTERNAL_IP_LOCAL: KnownSet(HASH_IP_PORT, _local("service external ip + port")),
    LOAD_BALANCER: KnownSet(HASH_IP_PORT, "Kubernetes service lb portal"),
    LOAD_BALANCER_LOCAL: KnownSet(HASH_IP_PORT, _local("service load balancer ip + port")),
    LOAD_BALANCER_FW: KnownSet(
        HASH_IP_PORT, "Kubernetes service load balancer ip + port for load balancer with sourceRange"
    ),
    LOAD_BALANCER_SOURCE_CIDR: KnownSet(
        HASH_IP_PORT_NET, "Kubernetes service load balancer ip + port + source cidr for packet filter purpose"
    ),
    LOAD_BALANCER_SOURCE_IP: KnownSet(
        HASH_IP_PORT_IP, "Kubernetes service load balancer ip + port + source IP for packet filter purpose"
    ),
    NODE_PORT_TCP: KnownSet(BITMAP_PORT, "Kubernetes nodeport TCP port for masquerade purpose"),
    NODE_PORT_LOCAL_TCP: KnownSet(BITMAP_PORT, _local("nodeport TCP port")),
    NODE_PORT_UDP: KnownSet(BITMAP_PORT, "Kubernetes nodeport UDP port for masquerade purpose"),
    NODE_PORT_LOCAL_UDP: KnownSet(BITMAP_PORT, _local("nodeport UDP port")),
    NODE_PORT_SCTP: KnownSet(
        HASH_IP_PORT, "Kubernetes nodeport SCTP port for masquerade purpose with type 'hash ip:port'"
    ),
    NODE_PORT_LOCAL_SCTP: KnownSet(HASH_IP_PORT, _local("nodeport SCTP port") + " with type 'hash ip:port'"),
    HEALTH_CHECK_NODE_PORT: KnownSet(BITMAP_PORT, "Kubernetes health check node port"),
    IPVS_IPS: KnownSet(HASH_IP, "Addresses on the ipvs interface"),
    INTERNAL_DROPPED: KnownSet(HASH_IP_PORT, "cluster IP + port with policy Local and no local endpoint"),
    EXTERNAL_DROPPED: KnownSet(HASH_IP_PORT, "external address + port with policy Local and no local endpoint"),
}

#: The sets that kube-proxy does not have.
OWN_SETS = frozenset((INTERNAL_DROPPED, EXTERNAL_DROPPED))

NODE_PORT_SETS: dict[str, tuple[str, str]] = {
    "tcp": (NODE_PORT_TCP, NODE_PORT_LOCAL_TCP),
    "udp": (NODE_PORT_UDP, NODE_PORT_LOCAL_UDP),
    "sctp": (NODE_PORT_SCTP, NODE_PORT_LOCAL_SCTP),
}


def set_name(name: str, family: str) -> str:
    """Return the name of a set in a family: ``KUBE-6-`` instead of ``KUBE-`` for IPv6, cut to the kernel's limit."""
    return ("KUBE-6-" + name[len("KUBE-") :])[:_LONGEST_NAME] if family == IPV6 else name


# Names per family; looked up for every entry of every ServicePort.
NAMES: dict[str, dict[str, str]] = {
    family: {name: set_name(name, family) for name in SETS} for family in ("IPv4", "IPv6")
}


#: The family that each set belongs to, by its name in the kernel.
FAMILY_OF_SET: dict[str, str] = {actual: family for family, names in NAMES.items() for actual in names.values()}

#: The protocol of each set that holds node ports, by its name in the kernel.
PROTOCOL_OF_NODE_PORTS: dict[str, str] = {
    names[name]: protocol for names in NAMES.values() for protocol, plain in NODE_PORT_SETS.items() for name in plain
}


_EXEMPTING = {LOAD_BALANCER_LOCAL: LOAD_BALANCER, **{local: plain for plain, local in NODE_PORT_SETS.values()}}
_MASQUERADING = {names[local]: names[plain] for names in NAMES.values() for local, plain in _EXEMPTING.items()}


def exempted(key: SetElementKey) -> Optional[SetElementKey]:
    """Return the element whose connections an element exempts from masquerading, None for other elements."""
    return key._replace(set=_MASQUERADING[key.set]) if key.set in _MASQUERADING else None


def known_definitions(family: str) -> dict[str, SetDefinition]:
    """Return all sets that a family may have, by name."""
    found: dict[str, SetDefinition] = {}
    for name, known in SETS.items():
        bitmap = known.type == BITMAP_PORT
        found[NAMES[family][name]] = SetDefinition(known.type, "" if bitmap else family)
    return found


def definitions(family: str, behaviour: Behaviour = KUBE_PROXY) -> dict[str, SetDefinition]:
    """Return the sets of a family by name; they exist whether they have elements or not."""
    found = known_definitions(family)
    if not behaviour.local_means_local:
        for name in OWN_SETS:
            del found[NAMES[family][name]]
    return found
