# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of network policies, of both families, as one resource, with the table of the ports of bridges."""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from ...rendering.networkpolicy import bridge_keys
from ...rendering.networkpolicy.sets import TABLE
from ...rendering.nftables.objects import Key, Value
from ...resources import NO_CHANGE, Change, Kind, Part
from .resource import NftablesResource
from .transactions import Transaction

#: Isolation, grants and sources must change together, so a change is always one transaction.
_ALL_ELEMENTS = 1 << 62


class _PortsTable(NftablesResource):
    """Table ``bridge kubenode-network-policy``, which only the resource of both tables changes."""

    kind = Kind.POLICY_OBJECTS
    table = bridge_keys.TABLE
    table_family = bridge_keys.BRIDGE


class PolicyTableResource(NftablesResource):
    """Table ``inet kubenode-network-policy`` in the network namespace of the calling thread.

    The objects of the table of the ports of bridges are among its own, see :mod:`.bridged`. Both tables change in one
    transaction: a port may use an address only as long as its policies are in force.
    """

    kind = Kind.POLICY_OBJECTS
    table = TABLE
    table_family = "inet"

    def __init__(self) -> None:
        super().__init__("", _ALL_ELEMENTS)
        self._ports = _PortsTable("", _ALL_ELEMENTS)

    def close(self) -> None:
        """Close the sockets; closing twice is harmless."""
        super().close()
        self._ports.close()

    def parts(
        self, expected: Mapping[Key, Value], urgent: Change[Key, Value] = NO_CHANGE
    ) -> Iterator[Part[Key, Value]]:
        """See the base class; the table of ports is one part. Raises KernelError."""
        of_policies = {key: value for key, value in expected.items() if not bridge_keys.is_bridged(key)}
        yield from super().parts(of_policies, bridge_keys.of_policies(urgent))
        yield Part(_prefixed(self._ports.observe()), filter(bridge_keys.is_bridged, expected))

    def is_empty(self) -> bool:
        """Return whether neither table exists. Raises KernelError."""
        return super().is_empty() and self._ports.is_empty()

    def _transactions(self, change: Change[Key, Value]) -> Iterator[Transaction]:
        """Yield the transactions of both tables, of which the last ones are one: see the base class."""
        policies = list(super()._transactions(bridge_keys.of_policies(change)))
        ports = list(self._ports._transactions(bridge_keys.of_ports(change)))
        last = [message for each in (*policies[-1:], *ports[-1:]) for message in each.messages]
        yield from (*policies[:-1], *ports[:-1], *([Transaction(last)] if last else []))

    def _touched(self, change: Change[Key, Value]) -> Part[Key, Value]:
        """See the base class."""
        policies = super()._touched(bridge_keys.of_policies(change)).observed
        ports = self._ports._touched(bridge_keys.of_ports(change)).observed
        return Part({**policies, **_prefixed(ports)}, (*change.removed, *change.replaced, *change.added))

    def describe(self, key: Key, value: Any) -> list[str]:
        """Return one entry in the syntax of the nft program."""
        # Imported late: only changes are described.
        from ...rendering.networkpolicy.text import describe

        return describe(key, value)


def _prefixed(ports: Mapping[Key, Value]) -> dict[Key, Value]:
    return {bridge_keys.prefixed(key): value for key, value in ports.items()}
