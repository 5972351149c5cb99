# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detection of external changes from the kernel's notifications: nf_tables and routing netlink."""

from __future__ import annotations

import socket
from typing import Iterable, Mapping, Protocol, Sequence

from ...base.addresses import is_link_local
from ...kernel.nftables.monitor import ChainMonitor, NftMonitor, TableMonitor
from ...kernel.nftables.resource import NftablesResource
from ...kernel.rtnetlink.address_monitor import AddressEvent, AddressMonitor, LinkRemoved
from ...kernel.xtables.chains import ChainsResource
from ...rendering.desired import DesiredTables
from ...resources import Kind, Stage

XTABLES_TABLES = ("mangle", "filter", "nat")
#: Names of our chains, and jumps to them from chains of other programs, all contain this.
_OUR_CHAINS = b"KUBE-"


class WatchedFamily(Protocol):
    """A family whose tables other programs may change: its name, the stages that hold its tables, and the tables."""

    family: str
    stages: list[Stage]
    tables: DesiredTables


class Watch:
    """One way to detect changes. ``interval``: seconds between calls of :meth:`poll`, 0 to wait for its descriptor."""

    interval = 0.0

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when :meth:`poll` should be called; -1 if there is none."""
        return -1

    def rest(self) -> float:
        """Return the seconds for which there is no descriptor, after which there is one again; else 0."""
        return 0.0

    def poll(self, found: dict[str, str]) -> None:
        """Add families that need to be observed. Raises KernelError."""

    def synced(self, changed: bool, observed: bool) -> None:
        """Handle the end of a sync. ``changed``: it changed something; ``observed``: it observed everything."""

    def close(self) -> None:
        """Stop watching."""


def suspect(found: dict[str, str], families: Iterable[str], reason: str) -> None:
    """Add families that need to be observed, keeping the reason of those that are already in ``found``."""
    for family in families:
        found.setdefault(family, reason)


class NftWatch(Watch):
    """Detects other programs' nf_tables transactions that change our objects.

    ``observed``: what must then be observed, by the family of the kernel.
    """

    def __init__(self, observed: Mapping[str, str], monitor: NftMonitor) -> None:
        self._observed = observed
        self._monitor = monitor

    def fileno(self) -> int:
        """See the base class."""
        return self._monitor.fileno()

    def poll(self, found: dict[str, str]) -> None:
        """See the base class."""
        changed = self._monitor.changes() & self._observed.keys()
        reason = f"{'lost notifications' if self._monitor.lost else 'notification'} of nf_tables"
        author = self._monitor.author
        suspect(found, [self._observed[each] for each in changed], f"{reason} ({author})" if author else reason)

    def close(self) -> None:
        """See the base class."""
        self._monitor.close()


def nftables_watch(families: Sequence[WatchedFamily]) -> Watch:
    """Return a watch on the mode's table of each family. Raises KernelError."""
    resources = [stage.resource for family in families for stage in family.stages]
    tables = [item for item in resources if isinstance(item, NftablesResource)]
    return NftWatch(
        {item.family: item.family for item in tables},
        TableMonitor((item.port for item in tables), tables[0].table.name),
    )


def xtables_nft_watch(resources: Sequence[ChainsResource]) -> Watch:
    """Return a watch on our chains and the jumps to them, for iptables-nft. Raises KernelError."""
    families = {resource.family for resource in resources}

    def is_own(process: int) -> bool:
        return any(process in resource.processes for resource in resources)

    return NftWatch(
        {family: family for family in families}, ChainMonitor(families, XTABLES_TABLES, _OUR_CHAINS, is_own)
    )


class AddressWatch(Watch):
    """Detects changes of the node's addresses, and in modes that have one of the device with service addresses.

    ``changed``: whether addresses of other interfaces changed; the caller resets it.
    """

    def __init__(self, families: Sequence[WatchedFamily], device: str) -> None:
        self._device = device
        self._families = {watched.family: watched for watched in families} if device else {}
        self._monitor = AddressMonitor()
        self.changed = False

    def fileno(self) -> int:
        """See the base class."""
        return self._monitor.fileno()

    def poll(self, found: dict[str, str]) -> None:
        """See the base class."""
        events = list(self._monitor.events())
        device = _index_of(self._device) if events and self._families else 0
        for event in events:
            if isinstance(event, LinkRemoved):
                if self._device and event.name == self._device:
                    suspect(found, self._families, "notification of routing netlink")
            elif device and event.interface == device:
                self._service_address(event, found)
            else:
                self.changed = True
        if self._monitor.pop_lost():
            self.changed = True
            suspect(found, self._families, "lost notifications of routing netlink")

    def _service_address(self, event: AddressEvent, found: dict[str, str]) -> None:
        family = self._families.get(event.family)
        if family is None or is_link_local(event.address):
            return
        wanted = event.address in family.tables.desired[Kind.ADDRESSES]
        if wanted != event.added:
            found.setdefault(event.family, "notification of routing netlink")

    def close(self) -> None:
        """See the base class."""
        self._monitor.close()


def _index_of(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0
