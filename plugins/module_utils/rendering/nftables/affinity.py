# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Session affinity: for the Services that request it, kube-proxy's own chains and sets.

Each endpoint has a set of the clients that it serves, with a timeout that every new connection restarts. Names and
types are those of kube-proxy 1.36, so that the clients it has recorded are kept when a node is taken over. A single map
of clients would need the result of one map as the key of another to notice that a client's endpoint has been removed;
the kernel can do that, but the nft program (1.0.6) aborts when it lists such a rule, which breaks ``nft list ruleset``
for every user of the node.
"""

from __future__ import annotations

import hashlib
from base64 import b32encode
from typing import NamedTuple

from ...base.addresses import packed
from ...serviceports.info import Endpoint, ServicePortInfo
from ...serviceports.weights import slots
from ..merged import Entry
from ..settings import DataplaneSettings
from . import balancing
from . import expressions as x
from . import objects as nft

_LONGEST_NAME = 240


def hashed_name(text: str) -> str:
    """Return the hash of a text followed by the text, cut to the kernel's limit (kube-proxy 1.36)."""
    name = f"{b32encode(hashlib.sha256(text.encode()).digest()).decode()[:8]}-{text}"
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."


def service_text(info: ServicePortInfo) -> str:
    """Return ``namespace/name/protocol/port name``."""
    return f"{info.key.namespace}/{info.key.name}/{info.protocol}/{info.key.port_name}"


def endpoint_name(info: ServicePortInfo, endpoint: Endpoint) -> str:
    """Return the hashed name of an endpoint; colons of an IPv6 address become dots."""
    return hashed_name(f"{service_text(info)}__{endpoint.ip.replace(':', '.')}/{endpoint.port}")


def clients_set(info: ServicePortInfo, endpoint: Endpoint) -> str:
    """Return the name of the set of the clients that an endpoint serves."""
    return _clients(endpoint_name(info, endpoint))


def _clients(name: str) -> str:
    return f"affinity-{name}"


class _Names(NamedTuple):
    """The names of one endpoint: of the set of its clients and of its chain, and the verdict that leads there."""

    clients: str
    chain: str
    target: nft.Expression


def _names(info: ServicePortInfo, endpoint: Endpoint) -> _Names:
    name = endpoint_name(info, endpoint)
    return _Names(_clients(name), f"endpoint-{name}", x.verdict(f"goto endpoint-{name}"))


class AffinityChains:
    """The chains of one ServicePort with ClientIP affinity.

    ``internal`` names the chain for its ClusterIP, ``external`` the one for all other traffic; ``entries`` has them
    all.
    """

    def __init__(self, info: ServicePortInfo, settings: DataplaneSettings) -> None:
        base = hashed_name(service_text(info))
        cluster, local = f"service-{base}", f"local-{base}"
        self.internal = local if info.internal_local else cluster
        self.external = f"external-{base}"
        self.entries: list[Entry] = []
        self._family = settings.family
        self._names = {endpoint: _names(info, endpoint) for endpoint in info.reachable}
        self._add_endpoints(info)
        if info.cluster:
            self._add_chain(cluster, self._choose(info, info.cluster))
        if info.local:
            self._add_chain(local, self._choose(info, info.local))
        if info.has_any and info.externally_accessible:
            self._add_chain(self.external, self._external_rules(info, settings, cluster, local))

    def _add_chain(self, name: str, rules: list[nft.Rule]) -> None:
        self.entries.append((nft.RESOURCE, nft.ObjectKey("chain", name), nft.ChainValue(tuple(rules))))

    def _add_endpoints(self, info: ServicePortInfo) -> None:
        family, words = self._family, x.address_words(self._family)
        clients = nft.SetValue(
            (nft.ADDRESS_TYPES[family],),
            dynamic=True,
            timeout=info.affinity_seconds * 1000,
            size=nft.DEFAULT_DYNAMIC_SIZE,
        )
        protocol = bytes([nft.PROTOCOL_NUMBERS[info.protocol]])
        source, port_word = x.source_address(family), words if words > 1 else 4
        rewrite = x.destination_nat(family, 0, port_word)
        for endpoint, names in self._names.items():
            address = packed(endpoint.ip) or b""
            redirect = [
                x.meta(x.META_L4PROTO),
                x.compare(protocol),
                x.value(address, 0),
                x.value(endpoint.port.to_bytes(2, "big"), port_word),
                rewrite,
            ]
            self.entries.append((nft.RESOURCE, nft.ObjectKey("set", names.clients), clients))
            self._add_chain(names.chain, [x.rule(source, x.remember(names.clients)), x.rule(redirect)])

    def _choose(self, info: ServicePortInfo, endpoints: tuple[Endpoint, ...]) -> list[nft.Rule]:
        found = [self._names[endpoint] for endpoint in endpoints]
        source = x.source_address(self._family)
        rules = [x.rule(source, x.lookup(names.clients), names.target) for names in found]
        # An endpoint with several places among those that are drawn gets a rule for each.
        drawn = [self._names[endpoint] for endpoint in slots(endpoints)] if info.weighted else found
        for position, names in enumerate(drawn):
            left = len(drawn) - position
            rules.append(x.rule([x.random_below(left), x.compare(bytes(4))] if left > 1 else [], names.target))
        return rules

    @staticmethod
    def _external_rules(info: ServicePortInfo, settings: DataplaneSettings, cluster: str, local: str) -> list[nft.Rule]:
        mark = settings.masquerade_mark
        if not info.external_local:
            rules = [x.rule(x.set_mark_bits(mark), comment="masquerade")]
            return [*rules, x.rule(x.verdict(f"goto {cluster}"))] if info.cluster else rules
        rules = balancing.short_circuits(settings.local_traffic, mark, cluster if info.cluster else "")
        return [*rules, x.rule(x.verdict(f"goto {local}"))] if info.local else rules
