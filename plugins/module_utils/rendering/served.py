# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find the Services that have endpoints, from the tables of any mode, kube-proxy's own included, and from ServicePorts.

A Service is identified by its cluster IP, which is unique in all modes; its external addresses are not counted.
"""

from __future__ import annotations

import re
from typing import Any, Iterable, Mapping

from ..base.addresses import unpacked
from ..serviceports.info import ServicePortInfo
from .iptables.fixed import SERVICES
from .iptables.names import CLUSTER_PREFIX, LOCAL_PREFIX
from .ipvs.model import RealServerKey, SetElementKey
from .ipvs.nftables_layout import FRONTENDS as IPVS_FRONTENDS
from .ipvs.sets import CLUSTER_IP, NAMES
from .nftables.layout import FRONTENDS
from .nftables.objects import ElementKey
from .userspace.model import ListenerKey

_CHAINS_RULE = re.compile(rf"-d ([^ /]+)/(?:32|128) .* -j (?:{CLUSTER_PREFIX}|{LOCAL_PREFIX})")
#: The map of kube-proxy 1.36 itself that corresponds to FRONTENDS.
_KUBE_PROXY_MAP = "service-ips"
#: Verdicts of frontends for internal traffic, those that are cluster IPs, with and without affinity.
_INTERNAL = ("goto cluster-", "goto local-", "goto service-")
_FRONTENDS = (FRONTENDS, _KUBE_PROXY_MAP)
_CLUSTER_IP_FRONTENDS = IPVS_FRONTENDS[CLUSTER_IP]
_CLUSTER_IP_SETS = frozenset(names[CLUSTER_IP] for names in NAMES.values())

Table = Mapping[Any, Any]


def served_cluster_ips(tables: Iterable[Table]) -> set[str]:
    """Return the cluster IPs, of both families, for which the tables have an endpoint.

    ``tables``: observed or desired resource tables of any mode; those of other resources are ignored.
    """
    served: set[str] = set()
    frontends: set[bytes] = set()
    cluster_ips: set[str] = set()
    with_real_servers: set[str] = set()
    for table in tables:
        for address in _CHAINS_RULE.findall("\n".join(table.get(SERVICES, ()))):
            served.add(address)
        for key, value in table.items():
            kind = type(key)
            if kind is ElementKey:
                if key.name in _FRONTENDS and str(value).startswith(_INTERNAL):
                    # The address is followed by protocol and port, each padded to a register of four bytes.
                    frontends.add(key.key[:-8])
                elif key.name == _CLUSTER_IP_FRONTENDS:
                    cluster_ips.add(unpacked(key.key[:-8]))
            elif kind is SetElementKey:
                if key.set in _CLUSTER_IP_SETS:
                    cluster_ips.add(key.element.partition(",")[0])
            elif kind is RealServerKey:
                if value.weight:
                    with_real_servers.add(key.server.address)
            elif kind is ListenerKey and value.endpoints:
                served.add(key.address)
    served.update(map(unpacked, frontends))
    return served | (cluster_ips & with_real_servers)


def routed_cluster_ips(service_ports: Iterable[ServicePortInfo]) -> set[str]:
    """Return the cluster IPs of the ServicePorts that have an endpoint for internal traffic."""
    return {info.cluster_ip for info in service_ports if (info.local if info.internal_local else info.cluster)}
