# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test by experiment, not by version, whether this kernel supports nftables mode.

A batch of messages without its end is validated like any other and then discarded (``nft --check`` does the same). So
the probe builds a small table with every kind of object and expression that the layout uses.
"""

from __future__ import annotations

from typing import Any, Dict, List

from ...addresses import IPV6
from ...errors import KernelError
from ...rendering.nftables import expressions as x
from ...rendering.nftables.objects import BaseHook, Key, TableIdentity, Value
from ...rendering.rendering import Rendering
from ...rendering.settings import DataplaneSettings, LocalTraffic
from ...resources import Change
from ...serviceports.info import Endpoint, ServicePortInfo, ServicePortName
from ..netlink.outcomes import NetlinkRefusal, is_forbidden, is_not_understood
from ..netlink.protocol import NETLINK_NETFILTER
from ..netlink.socket import NetlinkSocket, is_supported
from .messages import BATCH_BEGIN, Encoder
from .transactions import Labelled, Planner

PROBE_TABLE = TableIdentity("kube-proxy-probe", "")
#: NFT_MSG_GETGEN of NFNL_SUBSYS_NFTABLES (linux/netfilter/nf_tables.h).
_GET_GENERATION = 10 << 8 | 16


def _sample(family: str, rendering: Rendering[Any], resource: str, identity: TableIdentity) -> Dict[Key, Value]:
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


def _try(labelled: List[Labelled]) -> str:
    """Have the kernel validate messages without applying them; return the refusal and its reason, or an empty text."""
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        batch = [BATCH_BEGIN, *(each.message for each in labelled)]
        outcome = sock.transact(batch, single_send=True, acknowledge=False)
    for error in outcome.errors:
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


def answers() -> bool:
    """Return whether the kernel has nf_tables, by a query that changes nothing but may load the module.

    Raises KernelError if netlink itself fails.
    """
    if not is_supported(NETLINK_NETFILTER):
        return False
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        try:
            sock.request(_GET_GENERATION, b"\0" * 4)
        except NetlinkRefusal as refusal:
            # nfnetlink refuses requests to unknown subsystems this way; any other refusal comes from nf_tables.
            return not is_not_understood(refusal.error)
    return True


def nat_refused(family: str) -> str:
    """Return why nf_tables of this kernel has no NAT for a family; empty if it has, or if that cannot be determined.

    The nf_tables variant of iptables needs it too, and lists empty tables even if it could not write to them.
    """
    encoder = Encoder(family, PROBE_TABLE)
    batch = [BATCH_BEGIN, encoder.table(), encoder.chain("nat", BaseHook("nat", "prerouting", -100))]
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        outcome = sock.transact(batch, single_send=True, acknowledge=False)
    for error in outcome.errors:
        return "" if is_forbidden(error) else f"nf_tables has no NAT here ({error})"
    return ""


def can_hash(family: str) -> bool:
    """Return whether nf_tables has the hash by which clients are assigned to slots; True if this is not permitted.

    The kernel loads the module. Raises KernelError if netlink itself fails.
    """
    encoder = Encoder(family, PROBE_TABLE)
    rule = x.rule(x.source_address(family), x.hashed_below(2, 1, 0, 4 * x.address_words(family)))
    batch = [BATCH_BEGIN, encoder.table(), encoder.chain("hash", None), encoder.rule("hash", rule)]
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        outcome = sock.transact(batch, single_send=True, acknowledge=False)
    return all(is_forbidden(error) for error in outcome.errors)
