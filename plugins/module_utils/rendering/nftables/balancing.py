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

A hashed ServicePort has a list of slots instead (see :mod:`.slots`), and a chain such as ``cluster-hash-3f`` that
hashes the client's address to the index of a slot; ``cluster-hash-port-3f`` hashes its port, too. The kernel dumps a
map in time proportional to the square of its size, so slots are spread over many maps: 3f is the number of one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Optional
from zlib import crc32

from ...cluster.account import SLOTS
from ..settings import LocalTraffic
from . import expressions as x
from . import layout
from .layout import NODE_PORT_KEY, SERVICE_KEY
from .objects import ADDRESS_TYPES, INDEX, PORT, PROTOCOL, ChainValue, Rule, SetValue
from .slots import SEED

#: Draws before the last one, which cannot fail.
DRAWS = 10

CLUSTER = "cluster"
LOCAL = "local"
_MAPS = {
    (SERVICE_KEY, CLUSTER): layout.ENDPOINTS,
    (SERVICE_KEY, LOCAL): layout.LOCAL_ENDPOINTS,
    (NODE_PORT_KEY, CLUSTER): layout.NODE_PORT_ENDPOINTS,
    (NODE_PORT_KEY, LOCAL): layout.NODE_PORT_LOCAL_ENDPOINTS,
}
_SLOT_MAPS = {
    (SERVICE_KEY, CLUSTER): "service-slots",
    (SERVICE_KEY, LOCAL): "service-local-slots",
    (NODE_PORT_KEY, CLUSTER): "nodeport-slots",
    (NODE_PORT_KEY, LOCAL): "nodeport-local-slots",
}
#: Maps of slots of each kind of frontend and policy.
SLOT_MAPS = 256


class Choice(NamedTuple):
    """How a chain selects one of a frontend's endpoints: at random, or by slots.

    ``size``: the power of two below which an index is drawn. ``map_number``: of the map of slots, -1 for a choice at
    random; ``by_port``: hash the client's port, too.
    """

    size: int = 0
    map_number: int = -1
    by_port: bool = False

    @property
    def is_hash(self) -> bool:
        """Return whether the client's address determines the endpoint."""
        return self.map_number >= 0

    def __str__(self) -> str:
        """Return it as in the name of a chain."""
        if not self.is_hash:
            return str(self.size)
        return f"hash-{'port-' if self.by_port else ''}{self.map_number:02x}"


@lru_cache(maxsize=4096)
def at_random(count: int) -> Choice:
    """Return a choice among ``count`` endpoints; its size is the smallest power of two that is not less, 0 for none."""
    return Choice(1 << (count - 1).bit_length() if count else 0)


def by_slots(key: bytes, by_port: bool) -> Choice:
    """Return the choice by the slots of a ServicePort; ``key``: of its cluster IP, protocol and port."""
    return Choice(SLOTS, crc32(key) % SLOT_MAPS, by_port)


def endpoints_map(kind: str, policy: str, choice: Choice) -> str:
    """Return the map with the endpoint lists of a kind of frontend (SERVICE_KEY, NODE_PORT_KEY) and a policy."""
    return f"{_SLOT_MAPS[kind, policy]}-{choice.map_number:02x}" if choice.is_hash else _MAPS[kind, policy]


def slots_map(family: str, kind: str) -> SetValue:
    """Return a map of slots."""
    frontend = (PROTOCOL, PORT) if kind == NODE_PORT_KEY else (ADDRESS_TYPES[family], PROTOCOL, PORT)
    return SetValue((*frontend, INDEX), (ADDRESS_TYPES[family], PORT))


@lru_cache(maxsize=1024)
def chooser_name(kind: str, policy: str, choice: Choice) -> str:
    """Return the name of the chain that selects an endpoint."""
    return f"{kind}{policy}-{choice}"


def masquerade_name(kind: str, choice: Choice) -> str:
    """Return the name of the chain for external traffic with policy Cluster."""
    return f"{kind}masquerade-{choice}"


def external_local_name(kind: str, cluster: Choice, local: Choice) -> str:
    """Return the name of the chain for external traffic with policy Local."""
    return f"{kind}external-{cluster}-{local}"


def client(family: str, by_port: bool, word: int = 0) -> x.Expressions:
    """Load the fields that identify a client for hashing: its address, and its port if ``by_port``."""
    address = x.source_address(family, word)
    return [address, x.source_port(word + x.address_words(family))] if by_port else [address]


@lru_cache(maxsize=1024)
def chooser(family: str, kind: str, policy: str, choice: Choice) -> ChainValue:
    """Return the chain that redirects to one endpoint in the list of the packet's frontend."""
    words = x.address_words(family)
    if kind == NODE_PORT_KEY:
        key, position = x.protocol_and_port(), 2
    else:
        key, position = x.destination(family), words + 2
    found = x.map_lookup(endpoints_map(kind, policy, choice))
    redirect = x.destination_nat(family, 0, words)

    def draw(below: int) -> Rule:
        return x.rule(key, x.random_below(below, position), found, redirect)

    if choice.is_hash:
        # The nft program uses the same registers.
        source = position + 5
        hashed = x.hashed_below(SLOTS, SEED, source, 4 * (words + choice.by_port), position)
        return ChainValue((x.rule(key, client(family, choice.by_port, source), hashed, found, redirect),))
    if choice.size <= 2:
        return ChainValue((draw(choice.size),))
    return ChainValue((*(draw(choice.size),) * DRAWS, draw(choice.size // 2)))


@lru_cache(maxsize=1024)
def masquerading_chooser(kind: str, mark: int, choice: Choice) -> ChainValue:
    """Return the chain for external traffic with policy Cluster.

    The endpoint may be on any node, so the packet is masqueraded: the reply must return through this node.
    """
    target = chooser_name(kind, CLUSTER, choice)
    return ChainValue((x.rule(x.set_mark_bits(mark), comment="masquerade"), x.rule(x.verdict(f"goto {target}"))))


def short_circuits(traffic: Optional[LocalTraffic], mark: int, cluster_target: str) -> list[Rule]:
    """Return the rules that precede the local endpoints under policy Local.

    Pods of this node and the node itself may use all endpoints.
    """
    rules: list[Rule] = []
    if traffic is not None and cluster_target:
        pods = layout.from_local(traffic, True)
        rules.append(x.rule(pods, x.verdict(f"goto {cluster_target}"), comment="short-circuit pod traffic"))
    from_node = x.is_local(x.FIB_SADDR)
    rules.append(x.rule(from_node, x.set_mark_bits(mark), comment="masquerade local traffic"))
    if cluster_target:
        rules.append(x.rule(from_node, x.verdict(f"goto {cluster_target}"), comment="short-circuit local traffic"))
    return rules


@lru_cache(maxsize=4096)
def external_local(kind: str, traffic: Optional[LocalTraffic], mark: int, cluster: Choice, local: Choice) -> ChainValue:
    """Return the chain for external traffic with policy Local.

    Without local endpoints the chain ends with the short circuits, and the endpoints check drops the packet.
    """
    cluster_target = chooser_name(kind, CLUSTER, cluster) if cluster.size else ""
    rules = short_circuits(traffic, mark, cluster_target)
    if local.size:
        rules.append(x.rule(x.verdict(f"goto {chooser_name(kind, LOCAL, local)}")))
    return ChainValue(tuple(rules))
