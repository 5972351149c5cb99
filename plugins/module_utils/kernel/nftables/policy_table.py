# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of network policies, of both families, as one resource, with the table of the ports of bridges."""

from __future__ import annotations

from typing import Any, Iterator, List, Mapping

from ...rendering.networkpolicy import bridge_keys
from ...rendering.networkpolicy.sets import TABLE
from ...rendering.nftables.objects import Key, Value
from ...resources import NO_CHANGE, Change, Kind, Part
from ..netlink.socket import NetlinkSocket
from .resource import NftablesResource

#: Isolation and grants must appear together, so a change is always one transaction.
_ALL_ELEMENTS = 1 << 62


class _PortsTable(NftablesResource):
    """Table ``bridge kubenode-network-policy``. It uses the socket of the other table, and so the same port."""

    kind = Kind.POLICY_OBJECTS
    table = bridge_keys.TABLE
    table_family = bridge_keys.BRIDGE

    def __init__(self, policies: NftablesResource) -> None:
        super().__init__("", _ALL_ELEMENTS)
        self._policies = policies

    @property
    def socket(self) -> NetlinkSocket:
        """Return the socket of the other table."""
        return self._policies.socket


class PolicyTableResource(NftablesResource):
    """Table ``inet kubenode-network-policy`` in the network namespace of the calling thread.

    The objects of the table of the ports of bridges are among its own, see :mod:`.bridged`. Each of the two tables
    changes in one transaction.
    """

    kind = Kind.POLICY_OBJECTS
    table = TABLE
    table_family = "inet"

    def __init__(self) -> None:
        super().__init__("", _ALL_ELEMENTS)
        self._ports = _PortsTable(self)

    def parts(
        self, expected: Mapping[Key, Value], urgent: Change[Key, Value] = NO_CHANGE
    ) -> Iterator[Part[Key, Value]]:
        """See the base class; the table of ports is one part. Raises KernelError."""
        of_policies = {key: value for key, value in expected.items() if not bridge_keys.is_bridged(key)}
        yield from super().parts(of_policies, bridge_keys.of_policies(urgent))
        ports = {bridge_keys.prefixed(key): value for key, value in self._ports.observe().items()}
        yield Part(ports, filter(bridge_keys.is_bridged, expected))

    def is_empty(self) -> bool:
        """Return whether neither table exists. Raises KernelError."""
        return super().is_empty() and self._ports.is_empty()

    def apply(self, change: Change[Key, Value]) -> None:
        """Make the change, of each table in one transaction. Raises KernelError."""
        self._ports.commits = self.commits
        bridge_keys.apply_parts(change, super().apply, self._ports.apply)

    def describe(self, key: Key, value: Any) -> List[str]:
        """Return one entry in the syntax of the nft program."""
        # Imported late: only changes are described.
        from ...rendering.networkpolicy.text import describe

        return describe(key, value)
