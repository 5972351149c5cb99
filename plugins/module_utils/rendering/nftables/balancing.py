# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Chains that select an endpoint: a handful shared by all Services, however many there are.

A frontend's list of endpoints is stored in a map under the keys (frontend, 0) to (frontend, N-1). The chain
``cluster-8`` serves every frontend with five to eight endpoints: it draws an index below 8 and looks the endpoint up;
if there is none under this index, the rule ends and the next one draws again. Every endpoint is equally likely, and
because more than half of the indices are in use two draws suffice on average. After all draws have failed (one
connection in a thousand at worst) the last rule draws below 4, where every index is in use.

An endpoint with a larger weight than others is in the list several times.

So the verdict of a frontend changes only when its number of endpoints passes a power of two. That matters: each new
verdict makes the kernel check all verdict maps of the table again, which takes time in proportion to all Services;
changing an endpoint does not.
"""

from __future__ import annotations

from functools import lru_cache
from typing import List, Optional

from ..settings import LocalTraffic
from . import expressions as x
from . import layout
from .objects import ChainValue, Rule

#: Draws before the last one, which cannot fail.
DRAWS = 10

CLUSTER = "cluster"
LOCAL = "local"
_MAPS = {
    ("", CLUSTER): layout.ENDPOINTS,
    ("", LOCAL): layout.LOCAL_ENDPOINTS,
    ("nodeport-", CLUSTER): layout.NODE_PORT_ENDPOINTS,
    ("nodeport-", LOCAL): layout.NODE_PORT_LOCAL_ENDPOINTS,
}
SERVICE_KEY = ""
NODE_PORT_KEY = "nodeport-"


def size_class(count: int) -> int:
    """Return the smallest power of two that is not less than the number of endpoints; 0 for none."""
    return 1 << (count - 1).bit_length() if count else 0


def endpoints_map(kind: str, policy: str) -> str:
    """Return the map with the endpoint lists of a kind of frontend (SERVICE_KEY, NODE_PORT_KEY) and a policy."""
    return _MAPS[kind, policy]


def chooser_name(kind: str, policy: str, size: int) -> str:
    """Return the name of the chain that selects among at most ``size`` endpoints."""
    return f"{kind}{policy}-{size}"


def masquerade_name(kind: str, size: int) -> str:
    """Return the name of the chain for external traffic with policy Cluster."""
    return f"{kind}masquerade-{size}"


def external_local_name(kind: str, cluster_size: int, local_size: int) -> str:
    """Return the name of the chain for external traffic with policy Local."""
    return f"{kind}external-{cluster_size}-{local_size}"


@lru_cache(maxsize=1024)
def chooser(family: str, kind: str, policy: str, size: int) -> ChainValue:
    """Return the chain that redirects to one endpoint in the list of the packet's frontend."""
    words = x.address_words(family)

    def draw(below: int) -> Rule:
        if kind == NODE_PORT_KEY:
            key, position = x.protocol_and_port(), 2
        else:
            key, position = x.destination(family), words + 2
        found = x.map_lookup(_MAPS[kind, policy])
        return x.rule(key, x.random_below(below, position), found, x.destination_nat(family, 0, words))

    if size <= 2:
        return ChainValue((draw(size),))
    return ChainValue((*(draw(size),) * DRAWS, draw(size // 2)))


@lru_cache(maxsize=1024)
def masquerading_chooser(kind: str, mark: int, size: int) -> ChainValue:
    """Return the chain for external traffic with policy Cluster.

    The endpoint may be on any node, so the packet is masqueraded: the reply has to return through this node.
    """
    target = chooser_name(kind, CLUSTER, size)
    return ChainValue((x.rule(x.set_mark_bits(mark), comment="masquerade"), x.rule(x.verdict(f"goto {target}"))))


def short_circuits(traffic: Optional[LocalTraffic], mark: int, cluster_target: str) -> List[Rule]:
    """Return the rules that precede the local endpoints under policy Local.

    Pods of this node and the node itself may use all endpoints.
    """
    rules: List[Rule] = []
    if traffic is not None and cluster_target:
        pods = layout.from_local(traffic, True)
        rules.append(x.rule(pods, x.verdict(f"goto {cluster_target}"), comment="short-circuit pod traffic"))
    from_node = x.is_local(x.FIB_SADDR)
    rules.append(x.rule(from_node, x.set_mark_bits(mark), comment="masquerade local traffic"))
    if cluster_target:
        rules.append(x.rule(from_node, x.verdict(f"goto {cluster_target}"), comment="short-circuit local traffic"))
    return rules


@lru_cache(maxsize=4096)
def external_local(
    kind: str, traffic: Optional[LocalTraffic], mark: int, cluster_size: int, local_size: int
) -> ChainValue:
    """Return the chain for external traffic with policy Local.

    Without local endpoints the chain ends with the short circuits, and the endpoints check drops the packet.
    """
    cluster_target = chooser_name(kind, CLUSTER, cluster_size) if cluster_size else ""
    rules = short_circuits(traffic, mark, cluster_target)
    if local_size:
        rules.append(x.rule(x.verdict(f"goto {chooser_name(kind, LOCAL, local_size)}")))
    return ChainValue(tuple(rules))
