# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ports of a large Service, which are replaced some at a time so that changes of other Services fit in between.

A port is replaced as a whole: meanwhile the Service has its new endpoints at some ports and the former ones at others.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Set

from ...cluster.model import NamespacedName
from ...serviceports.info import ServicePortInfo, ServicePortName
from .summaries import Summaries


class Step(NamedTuple):
    """Some ports of a Service: ``number`` of ``ports``, from the ``first`` one on; the first follows the last.

    ``begins``: it is the first step since the Service changed, ``ends``: the last one.
    """

    first: int
    number: int
    ports: int
    begins: bool
    ends: bool

    def covers(self, index: int) -> bool:
        """Return whether the port of this number is one of them."""
        return (index - self.first) % self.ports < self.number


#: The steps of the Services of which only some ports are replaced.
Steps = Mapping[NamespacedName, Step]
NO_STEPS: Steps = MappingProxyType({})
#: All ports of a Service at once.
WHOLE = Step(0, 1, 1, begins=True, ends=True)


class _Number(NamedTuple):
    """What one port of a Service must have for itself: its number, or its node port."""

    protocol: str
    port: int
    node_port: int


def _numbers_of(info: ServicePortInfo) -> List[_Number]:
    protocol = info.key.protocol
    found = [_Number(protocol, info.port, 0)]
    return [*found, _Number(protocol, 0, info.node_port)] if info.node_port else found


class PortSteps:
    """What one family needs to know between the steps of its Services."""

    def __init__(self) -> None:
        # The ServicePorts of Services whose steps have begun and not ended.
        self._begun: Dict[NamespacedName, Sequence[ServicePortInfo]] = {}
        # Which ServicePort has which number, of Services with several ports.
        self._owners: Dict[NamespacedName, Dict[_Number, ServicePortName]] = {}

    def computed(self, service: NamespacedName, step: Step) -> Optional[Sequence[ServicePortInfo]]:
        """Return the ServicePorts that the first of these steps has computed; None if they must be computed now."""
        return None if step.begins else self._begun.get(service)

    def kept(
        self,
        services: Mapping[NamespacedName, Sequence[ServicePortInfo]],
        steps: Steps,
        known: Summaries,
    ) -> Set[ServicePortName]:
        """Return the ServicePorts that these steps leave as they are. ``known``: the Services that had any before."""
        kept: Set[ServicePortName] = set()
        for service, ports in services.items():
            step = steps.get(service, WHOLE)
            tied = self._is_tied(service, ports, service in known)
            if step.ends or tied:
                self._begun.pop(service, None)
            else:
                self._begun[service] = ports
            if not tied:
                kept.update([info.key for index, info in enumerate(ports) if not step.covers(index)])
        return kept

    def _is_tied(self, service: NamespacedName, ports: Sequence[ServicePortInfo], known: bool) -> bool:
        """Return whether a port may get a number that another one had: both must change together."""
        before = self._owners.pop(service, None)
        if len(ports) < 2:
            return known
        now = self._owners[service] = {number: info.key for info in ports for number in _numbers_of(info)}
        if before is None:
            return known
        return any(before.get(number, key) != key for number, key in now.items())
