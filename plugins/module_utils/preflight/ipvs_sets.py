# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The elements that Services add to ipsets in ipvs mode, for the check of :mod:`.limits`."""

from __future__ import annotations

from typing import Iterator, Mapping

from ..rendering.ipvs.entries import ipvs_facts
from ..rendering.ipvs.ipset_entries import service_port_entries
from ..rendering.ipvs.model import SET_ELEMENTS, SetElementKey
from ..rendering.settings import DataplaneSettings
from ..serviceports.info import ServicePortInfo, ServicePortName
from .limits import ELEMENTS_LIMIT, SetContribution


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
    facts = ipvs_facts(settings)
    bound = sum(_most_elements(info, len(facts.node_ips)) for info in service_ports.values())
    if bound <= limit:
        return
    for key, info in service_ports.items():
        needed = [name for table, name, _value in service_port_entries(info, facts) if table == SET_ELEMENTS]
        yield str(key), [(item.set, item.element) for item in needed if isinstance(item, SetElementKey)]
