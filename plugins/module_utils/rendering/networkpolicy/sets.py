# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sets and maps of the table of network policies, and the settings they depend on."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ...base.addresses import FAMILIES, IPV6
from ..nftables import objects as nft

TABLE_NAME = "kubenode-network-policy"
TABLE_COMMENT = "network policies, by kubenode-proxy"

ISOLATED, DENIED, SELF, POLICED = "isolated", "denied", "self", "policed"
PODS, BLOCKS, ANY, GRANTS = "pods", "blocks", "any", "grants"
PORTS, PORT_RANGES = "ports", "port-ranges"
POD_RANGES, KNOWN, EGRESS_EXEMPT = "pod-ranges", "known", "egress-exempt"
LINKS = "links"
POD_LINKS, BOUND, HERE, FORGED = "pod-links", "bound", "here", "forged"
EXEMPT_LINKS, EXEMPT = "exempt-links", "exempt"
TIER_PORTS, TIER_OTHERS = "tier-ports", "tier-others"

SIDES = ("in", "out")
TIERS = ("admin", "baseline")
OUTCOMES = ("accept", "deny")

#: No NFLOG group.
NO_LOG = -1


class Options(NamedTuple):
    """The settings on which the rules depend.

    ``tiers``: ClusterNetworkPolicies are enforced. ``cut``: connections are cut when they are no longer allowed, so a
    TCP connection must not be picked up in its middle. ``log_group``: NFLOG group of denied packets, or NO_LOG.
    ``unknown``: deny the traffic of addresses in the node's pod ranges that belong to no known pod.
    ``egress_exempt``: there are destinations to which no egress rule is applied. ``exempt``: there are addresses that
    pods may send from although they are not theirs.
    """

    tiers: bool = False
    cut: bool = False
    log_group: int = NO_LOG
    unknown: bool = False
    egress_exempt: bool = False
    exempt: bool = False


#: All options that add sets.
ALL_SETS = Options(tiers=True, unknown=True, egress_exempt=True, exempt=True)


def number(family: str) -> str:
    """Return the digit that ends the names of a family's objects."""
    return "6" if family == IPV6 else "4"


@lru_cache(maxsize=256)
def name(kind: str, family: str, side: str = "") -> str:
    """Return the name of a set or chain: ``grants-in4``, ``pods6``."""
    return f"{kind}-{side}{number(family)}" if side else f"{kind}{number(family)}"


def links(side: str) -> str:
    """Return the name of the set of interfaces on which link-local traffic is denied."""
    return f"{LINKS}-{side}"


def drop_name(family: str, side: str) -> str:
    """Return the name of the chain that drops what policies deny."""
    return name("drop", family, side)


def tier_grants(tier: str, side: str, family: str) -> str:
    """Return the name of the map with the outcomes of a tier."""
    return name(f"{tier}-grants", family, side)


def definitions(options: Options) -> dict[str, nft.SetValue]:
    """Return all sets and maps by name."""
    port_key = (nft.CLASSID, nft.PROTOCOL, nft.PORT)
    ranges = nft.SET_INTERVAL | nft.SET_CONCAT
    found = {PORTS: nft.SetValue(port_key), PORT_RANGES: nft.SetValue(port_key, flags=ranges)}
    for family in FAMILIES:
        address = nft.ADDRESS_TYPES[family]
        grants = nft.SetValue((nft.CLASSID, address), (nft.CLASSID,))
        found[name(SELF, family)] = nft.SetValue((address, address))
        found[name(PODS, family)] = nft.SetValue((address,), (nft.CLASSID,))
        found[name(BLOCKS, family)] = nft.SetValue((address,), (nft.CLASSID,), flags=nft.SET_INTERVAL)
        if options.unknown:
            found[name(POD_RANGES, family)] = nft.SetValue((address,), flags=nft.SET_INTERVAL)
            found[name(KNOWN, family)] = nft.SetValue((address,))
        found[name(BOUND, family)] = nft.SetValue((nft.INTERFACE, address))
        found[name(HERE, family)] = nft.SetValue((address,))
        if options.exempt:
            found[name(EXEMPT, family)] = nft.SetValue((address,), flags=nft.SET_INTERVAL)
        if options.egress_exempt:
            found[name(EGRESS_EXEMPT, family)] = nft.SetValue((address,), flags=nft.SET_INTERVAL)
        for side in SIDES:
            found[name(ISOLATED, family, side)] = nft.SetValue((address,))
            found[name(DENIED, family, side)] = nft.SetValue((address,), counted=True)
            found[name(ANY, family, side)] = nft.SetValue((address,), (nft.CLASSID,))
            found[name(GRANTS, family, side)] = grants
            if options.tiers:
                found[name(POLICED, family, side)] = nft.SetValue((address,))
                found.update({tier_grants(tier, side, family): grants for tier in TIERS})
    found.update({links(side): nft.SetValue((nft.INTERFACE,)) for side in SIDES})
    found[POD_LINKS] = nft.SetValue((nft.INTERFACE,))
    found[FORGED] = nft.SetValue((nft.INTERFACE,), counted=True)
    if options.exempt:
        found[EXEMPT_LINKS] = nft.SetValue((nft.INTERFACE,))
    if options.tiers:
        for outcome in OUTCOMES:
            found[f"{TIER_PORTS}-{outcome}"] = nft.SetValue(port_key, flags=ranges)
            found[f"{TIER_OTHERS}-{outcome}"] = nft.SetValue((nft.CLASSID,))
    return found


TABLE = nft.TableIdentity(
    TABLE_NAME, TABLE_COMMENT, {key: value for key, value in definitions(ALL_SETS).items() if value.is_interval}
)
