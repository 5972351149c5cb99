# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check that the Services fit into the ipsets, which refuse more than 65,536 elements."""

from __future__ import annotations

from typing import Dict, Hashable, Iterable, Iterator, List, Mapping, Set, Tuple

from ..rendering.ipvs.entries import node_facts
from ..rendering.ipvs.ipset_entries import service_port_entries
from ..rendering.ipvs.model import SET_ELEMENTS, SetElementKey
from ..rendering.settings import DataplaneSettings
from ..serviceports.info import ServicePortInfo, ServicePortName
from .findings import ERROR, SET_LIMIT, Finding

ELEMENTS_LIMIT = 65536

SetContribution = Tuple[str, Iterable[Tuple[str, Hashable]]]
"""The name of a Service port (``shop/cart:http``) and the (set, element) pairs that it needs."""


def set_limit_findings(contributions: Iterable[SetContribution], limit: int = ELEMENTS_LIMIT) -> List[Finding]:
    """Return one error per set that would exceed ``limit`` elements; it names the first Service that does not fit.

    Elements that several Services need count once. The order of ``contributions`` decides which Service is first.
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
            "use ipvsGlue nftables, or mode nftables or iptables, without such a limit, or exclude Services by label",
        )
        for name, service in first_too_many.items()
    ]


def _most_elements(info: ServicePortInfo, node_ips: int) -> int:
    """Return an upper bound of the elements that a ServicePort adds to one set."""
    external = len(info.external_ips) * (1 + len(info.external_ip_sources or ()))
    external += len(info.load_balancer_ips) * (1 + len(info.source_ranges or ()))
    external += max(1, node_ips) * (1 + len(info.node_port_sources or ()))
    return 1 + external + len(info.endpoints)


def ipvs_set_contributions(
    service_ports: Mapping[ServicePortName, ServicePortInfo], settings: DataplaneSettings, limit: int = ELEMENTS_LIMIT
) -> Iterator[SetContribution]:
    """Yield the set elements of each Service port of one family in ipvs mode, in the order of ``service_ports``.

    Yield nothing, without rendering, if an upper bound shows that no set can exceed ``limit``.
    """
    facts = node_facts(settings)
    bound = sum(_most_elements(info, len(facts.node_ips)) for info in service_ports.values())
    if bound <= limit:
        return
    for key, info in service_ports.items():
        needed = [name for table, name, _value in service_port_entries(info, facts) if table == SET_ELEMENTS]
        yield str(key), [(item.set, item.element) for item in needed if isinstance(item, SetElementKey)]
