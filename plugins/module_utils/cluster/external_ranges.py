# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ranges to which the operator limits external IPs and load balancer addresses of Services of the cluster.

Without them, who may write Services can claim any address that no other one has (see ``claims``), such as one of
another network, and get the traffic that nodes send there (CVE-2020-8554). An address outside of the ranges is refused,
so it makes no claim; the rest of the Service is served.

A static Service is the operator's and not limited. Neither is a load balancer address that leads to the API servers at
all ports of its Service (see ``api_addresses``).
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from ..base.addresses import is_admitted
from .claims import Claim
from .model import Service

#: The field of the configuration, as refusals name it.
FIELD = "servicePolicy.externalRanges"
EXTERNAL_IPS, INGRESS = "spec.externalIPs", "status.loadBalancer.ingress"
_REASON = f"outside of {FIELD}"


class Confined(NamedTuple):
    """A Service with addresses outside of the ranges.

    ``whole``: as it was given; ``served``: without these addresses; ``refused``: each of them with its field.
    """

    whole: Service
    served: Service
    refused: dict[str, str]

    def reasons(self) -> list[tuple[str, str]]:
        """Return each field with its first address that is refused, and how many others there are."""
        found = []
        for field in (INGRESS, EXTERNAL_IPS):
            addresses = [address for address, of in self.refused.items() if of == field]
            if addresses:
                others = f" and {len(addresses) - 1} more are" if len(addresses) > 1 else " is"
                found.append((field, f"{addresses[0]}{others} {_REASON}"))
        return found

    def reason_at(self, address: str) -> str:
        """Return why an address is not served; empty if it is not refused."""
        field = self.refused.get(address)
        return f"Service {self.whole.key}: {field}: {address} is {_REASON}" if field else ""


def confined(service: Service, ranges: tuple[str, ...], leading: frozenset[Claim]) -> Optional[Confined]:
    """Return a Service confined to these CIDRs; None if it has no other address, as nearly all do not.

    ``leading``: those of its load balancer addresses, with port, at which it leads to the API servers.
    """
    if not ranges or service.static or not (service.external_ips or service.load_balancer_ips):
        return None
    refused = {address: EXTERNAL_IPS for address in service.external_ips if not is_admitted(address, ranges)}
    for address in service.load_balancer_ips:
        leads = all(Claim(address, port.port, port.protocol) in leading for port in service.ports)
        if not leads and not is_admitted(address, ranges):
            refused[address] = INGRESS
    if not refused:
        return None
    served = service._replace(
        external_ips=tuple([item for item in service.external_ips if is_admitted(item, ranges)]),
        load_balancer_ips=tuple([item for item in service.load_balancer_ips if refused.get(item) != INGRESS]),
    )
    return Confined(service, served, refused)
