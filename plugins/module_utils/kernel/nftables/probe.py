# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test by experiment, not by version, whether this kernel supports nftables mode.

A batch of messages without its end is validated like any other and then discarded (``nft --check`` does the same). So
the probe builds a small table with every kind of object and expression that the layout uses.
"""

from __future__ import annotations

from typing import Any

from ...base.addresses import IPV6
from ...base.errors import KernelError
from ...rendering.nftables.objects import Key, TableIdentity, Value
from ...rendering.rendering import Rendering
from ...rendering.settings import DataplaneSettings, LocalTraffic
from ...resources import Change
from ...serviceports.info import Endpoint, ServicePortInfo, ServicePortName
from .features import PROBE_TABLE, refusals
from .messages import Encoder
from .transactions import Labelled, Planner


def _sample(family: str, rendering: Rendering[Any], resource: str, identity: TableIdentity) -> dict[Key, Value]:
    """Return a desired table in which every kind of object occurs once."""
    six = family == IPV6
    address, network = ("2001:db8::1", "2001:db8::/32") if six else ("192.0.2.1", "192.0.2.0/24")
    endpoints = tuple(Endpoint(address, port, is_local=True) for port in (1, 2, 3))

    def info(name: str, affinity: int) -> ServicePortInfo:
        return ServicePortInfo(
            key=ServicePortName("probe", name, "", "TCP"),
            family=family,
            cluster_ip=address,
            port=1 + affinity,
            node_port=1 + affinity,
            external_ips=(),
            load_balancer_ips=(address,),
            source_ranges=(network,),
            affinity_seconds=affinity,
            internal_local=False,
            external_local=True,
            externally_accessible=True,
            uses_cluster_endpoints=True,
            uses_local_endpoints=True,
            health_check_node_port=0,
            endpoints=endpoints,
            cluster=endpoints,
            local=endpoints,
            reachable=endpoints,
            has_any=True,
        )

    service_ports = {item.key: item for item in (info("plain", 0), info("sticky", 1))}
    settings = DataplaneSettings(family, local_traffic=LocalTraffic("cidr", network), service_cidrs=(network,))
    table = rendering.desired_tables(service_ports, settings)[resource]
    return {PROBE_TABLE.key if key == identity.key else key: value for key, value in table.items()}


def _try(labelled: list[Labelled]) -> str:
    """Have the kernel validate messages without applying them; return the refusal and its reason, or an empty text."""
    for error in refusals(each.message for each in labelled):
        where = labelled[error.position - 1].label if 0 < error.position <= len(labelled) else "nf_tables"
        return f"{where}: {error}"
    return ""


def refused_part(family: str, rendering: Rendering[Any], resource: str, identity: TableIdentity) -> str:
    """Return the part of a mode's table for a family that this kernel refuses, and why; empty if it refuses none.

    ``resource``: the name of the table among those of the rendering, ``identity``: its name in the kernel. Changes
    nothing.
    """
    change: Change[Key, Value] = Change(_sample(family, rendering, resource, identity))
    try:
        return _try(next(Planner(Encoder(family, PROBE_TABLE)).transactions(change)).messages)
    except KernelError as error:
        return str(error)
