# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether every set holds what the Services need: an ipset takes 65,536 elements and then refuses."""

from __future__ import annotations

from typing import Dict, Hashable, Iterable, Iterator, List, Mapping, Set, Tuple

from ..rendering.ipvs.entries import node_facts, service_port_entries
from ..rendering.ipvs.model import SET_ELEMENTS, SetElementKey
from ..rendering.settings import DataplaneSettings
from ..serviceports.info import ServicePortInfo, ServicePortName
from .findings import ERROR, SET_LIMIT, Finding

ELEMENTS_LIMIT = 65536

SetContribution = Tuple[str, Iterable[Tuple[str, Hashable]]]
"""A Service port in words (``shop/cart:http``) and the (set, element) pairs that it needs."""


def set_limit_findings(contributions: Iterable[SetContribution], limit: int = ELEMENTS_LIMIT) -> List[Finding]:
    """One error per set that would hold more than ``limit`` elements, naming the first Service that no longer fits.

    Elements that several Services need count once. The order of ``contributions`` decides who is first.
    """
    elements: Dict[str, Set[Hashable]] = {}
    first_too_many: Dict[str, str] = {}
    for service, needed in contributions:
        for name, element in needed:
            known = elements.setdefault(name, set())
            known.add(element)
            if len(known) > limit:
                first_too_many.setdefault(name, service)
    return [
        Finding(
            SET_LIMIT,
            ERROR,
            f"ipset {name} holds at most {limit} elements, {len(elements[name])} are needed;"
            f" Service {service} is the first that no longer fits",
            "use mode nftables or iptables, which have no such limit, or leave Services out by label",
        )
        for name, service in first_too_many.items()
    ]


def _most_elements(info: ServicePortInfo) -> int:
    """No set gets more elements from a ServicePort than this, node ports on few addresses aside."""
    external = len(info.external_ips) + len(info.load_balancer_ips) * (1 + len(info.source_ranges))
    return 1 + external + len(info.endpoints)


def ipvs_set_contributions(
    service_ports: Mapping[ServicePortName, ServicePortInfo], settings: DataplaneSettings, limit: int = ELEMENTS_LIMIT
) -> Iterator[SetContribution]:
    """What each Service port of one family puts into the sets of ipvs mode, in the order of ``service_ports``.

    Nothing at all where so few elements are needed that no set can be too small, which costs no rendering.
    """
    facts = node_facts(settings)
    bound = sum(map(_most_elements, service_ports.values())) + len(service_ports) * max(1, len(facts.node_ips))
    if bound <= limit:
        return
    for key, info in service_ports.items():
        needed = [name for table, name, _value in service_port_entries(info, facts) if table == SET_ELEMENTS]
        yield str(key), [(item.set, item.element) for item in needed if isinstance(item, SetElementKey)]
