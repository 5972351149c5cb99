# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ports behind the port names that rules use, counted over the different port layouts of pods."""

from __future__ import annotations

from collections import Counter
from typing import AbstractSet, Collection, Iterable, Mapping, NamedTuple, Optional

from ...cluster.model import NamespacedName
from ...cluster.policies.policy_model import EGRESS, ContainerPort, Pod
from .compiled import CompiledRule, NamedPort
from .ports import PROTOCOL_NUMBERS


class Resolved(NamedTuple):
    """Different layouts of named ports, and the number of ports that names resolve to in all of them together."""

    layouts: int
    ports: int


class _Layouts(NamedTuple):
    """The number of layouts, and how many ports have a name in all of them together (protocol 0: of any protocol)."""

    number: int
    ports: Mapping[NamedPort, int]


class PortNames:
    """Counts what names resolve to, at a cost that depends on the number of names only after the first call.

    Pods with the same ports, like those of a Deployment, count once. ``used``: the names to consider, by default all;
    layouts that differ only in others are the same. ``of_namespace``: the names of the pods.
    """

    def __init__(
        self,
        pods: Mapping[NamespacedName, Pod],
        of_namespace: Mapping[str, Collection[NamespacedName]],
        used: Optional[AbstractSet[str]] = None,
    ) -> None:
        self._pods = pods
        self._of_namespace = of_namespace
        self._used = used
        self._known: dict[Optional[str], _Layouts] = {}

    def of_rules(self, rules: Iterable[CompiledRule], direction: str, namespace: str) -> Resolved:
        """Return what the names in rules of a namespace's policy resolve to, at most.

        Names of ingress rules, and of rules whose peers are in the namespace, resolve to ports of its pods.
        """
        layouts = ports = 0
        for rule in rules:
            if rule.names:
                found = self._in(None if direction == EGRESS and _leaves_namespace(rule) else namespace)
                here = sum(found.ports.get(name, 0) for name in rule.names)
                layouts += min(found.number, here)
                ports += here
        return Resolved(layouts, ports)

    def _in(self, namespace: Optional[str]) -> _Layouts:
        """Return the layouts of the pods in a namespace, of all pods for None."""
        found = self._known.get(namespace)
        if found is None:
            keys = self._pods.keys() if namespace is None else self._of_namespace.get(namespace, ())
            different = {self.layout(self._pods[key].ports) for key in keys} - {frozenset()}
            counts: Counter[NamedPort] = Counter()
            for layout in different:
                for port in layout:
                    counts[NamedPort(0, port.name)] += 1
                    counts[NamedPort(PROTOCOL_NUMBERS[port.protocol], port.name)] += 1
            found = self._known[namespace] = _Layouts(len(different), counts)
        return found

    def layout(self, ports: Iterable[ContainerPort]) -> frozenset[ContainerPort]:
        """Return the ports of a pod that have one of the names to consider."""
        return frozenset(port for port in ports if self._used is None or port.name in self._used)


def _leaves_namespace(rule: CompiledRule) -> bool:
    """Return whether a rule may match pods of other namespaces than that of its policy."""
    return rule.every_peer or bool(rule.blocks) or any(peer.namespaces is not None for peer in rule.pods)
