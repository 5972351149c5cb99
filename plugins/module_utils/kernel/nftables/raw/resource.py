# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Save a table as the kernel reports it, whichever program created it, and restore it unchanged.

Its objects are kept as uninterpreted netlink attributes: only volatile ones (handles, use counts, counters, expiring
elements) are omitted. So a table that kube-proxy itself created is restored with everything that this project would
never create: comments, intervals, anonymous sets. Keys and values: see ``reading``.
"""

from __future__ import annotations

import time
from typing import Any, Iterator

from ....base.errors import KernelError
from ....rendering.ipvs.nftables_layout import IPVS_TABLE
from ....rendering.networkpolicy import bridge_keys
from ....rendering.networkpolicy.sets import TABLE as POLICY_TABLE
from ....rendering.networkpolicy.text import element_text
from ....rendering.nftables import objects as nft
from ....rendering.nftables.layout import SERVICES_TABLE
from ....rendering.nftables.text import chain_lines, element_texts, table_family, table_line
from ....resources import Change, Kind, Resource
from ...netlink.attributes import number_in, parse_attributes
from ...netlink.outcomes import is_transient
from ...netlink.protocol import NETLINK_NETFILTER
from ...netlink.socket import NetlinkSocket
from .. import attributes as uapi
from ..decoding import parse_data, ranges
from ..listing import owner_hint
from .reading import RawChain, RawKey, RawReader, RawSet, RawTable, RawValue, StatefulKey
from .writing import chain_value, is_plain, rehearsed, replacement

_ATTEMPTS = 5


class RawTableResource(Resource[RawKey, RawValue]):
    """The raw table of a family, object by object; a change replaces the whole table in one transaction.

    ``table`` and ``table_family`` of a subclass identify another table than that of Services.
    """

    kind = Kind.TABLE_OBJECTS
    atomic = True
    table: nft.TableIdentity = SERVICES_TABLE
    table_family: str = ""

    def __init__(self, family: str) -> None:
        self.family = family
        self._table_family = self.table_family or family

    def observe(self) -> RawTable:
        """See the module. Raises KernelError."""
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            return RawReader(sock, self._table_family, self.table.name).everything()

    def refusal(self, table: RawTable) -> str:
        """Return why the kernel would refuse to restore an observed table; empty if it would not.

        Raises KernelError.
        """
        if is_plain(table):
            return ""
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            return rehearsed(sock, self._table_family, self.table.name, table)

    def apply(self, change: Change[RawKey, RawValue]) -> None:
        """Apply the change to the table; retry if another program changes it meanwhile. Raises KernelError."""
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            for attempt in range(1, _ATTEMPTS + 1):
                observed = RawReader(sock, self._table_family, self.table.name).everything()
                wanted = {key: value for key, value in observed.items() if key not in change.removed}
                wanted.update(change.new_values())
                batch = replacement(self._table_family, self.table.name, bool(observed), wanted)
                errors = sock.transact(batch, single_send=True, acknowledge=False).errors
                if not errors:
                    return
                again = any(map(is_transient, errors))
                if attempt == _ATTEMPTS or not again:
                    position = errors[0].position
                    where = f"message {position} of {len(batch)}" if position else "transaction"
                    table = f"table {self.table.name} ({self._table_family})"
                    text = f"{table} cannot be restored: {where}: {errors[0]}"
                    text += owner_hint(sock, self._table_family, self.table.name, errors[0])
                    raise KernelError(text)
                time.sleep(0.05 * attempt)

    def describe(self, key: RawKey, value: RawValue) -> list[str]:
        """Describe one object approximately as the nft program shows it."""
        table = f"{table_family(self._table_family)} {self.table.name}"
        if isinstance(value, RawChain):
            return [f"chain {key.name} {{", *chain_lines(chain_value(value)), "}"]
        if isinstance(value, RawSet):
            return [f"set {key.name} {{", *(f"\t{text}" for text in self.element_texts(key.name, value)), "}"]
        if isinstance(key, StatefulKey):
            return [f"object {table} {key.name} (type {key.type})"]
        return [table_line(table, _table_value(value))]

    def element_texts(self, _name: str, value: RawSet) -> Iterator[str]:
        """Yield the elements of the set of that name approximately as the nft program shows them."""
        for key, data in map(key_and_data, value.elements):
            yield element_texts(self.family, nft.ElementKey("element", "", key), data)[0]


def key_and_data(element: bytes) -> tuple[bytes, Any]:
    """Return the key of an element of a :class:`RawSet`, and its data: bytes, the text of a verdict, or True."""
    found = parse_attributes(memoryview(element), 0, len(element))
    key = parse_data(found[uapi.NFTA_SET_ELEM_KEY]) if uapi.NFTA_SET_ELEM_KEY in found else b""
    data = parse_data(found[uapi.NFTA_SET_ELEM_DATA]) if uapi.NFTA_SET_ELEM_DATA in found else True
    return key if isinstance(key, bytes) else b"", data


def _table_value(value: RawValue) -> nft.TableValue:
    raw = value if isinstance(value, bytes) else b""
    return nft.TableValue(number_in(parse_attributes(memoryview(raw), 0, len(raw)), uapi.NFTA_TABLE_FLAGS))


class RawIpvsTableResource(RawTableResource):
    """The table beside IPVS, of one family."""

    kind = Kind.IPVS_OBJECTS
    table = IPVS_TABLE


class _RawPortsTable(RawTableResource):
    """The table of the ports of bridges."""

    kind = Kind.POLICY_OBJECTS
    table = bridge_keys.TABLE
    table_family = bridge_keys.BRIDGE


class RawPolicyTableResource(RawTableResource):
    """The table of network policies, of both families, with that of the ports of bridges, see :mod:`.bridged`."""

    kind = Kind.POLICY_OBJECTS
    table = POLICY_TABLE
    table_family = "inet"

    def __init__(self) -> None:
        super().__init__("")
        self._ports = _RawPortsTable("")

    def observe(self) -> RawTable:
        """Return both tables. Raises KernelError."""
        return {**super().observe(), **{bridge_keys.prefixed(key): each for key, each in self._ports.observe().items()}}

    def refusal(self, table: RawTable) -> str:
        """Return why the kernel would refuse to restore one of the tables. Raises KernelError."""
        whole: Change[RawKey, RawValue] = Change(dict(table))
        return super().refusal(bridge_keys.of_policies(whole).added) or self._ports.refusal(
            bridge_keys.of_ports(whole).added
        )

    def apply(self, change: Change[RawKey, RawValue]) -> None:
        """Replace each table that changes. Raises KernelError."""
        parts = ((bridge_keys.of_policies(change), super().apply), (bridge_keys.of_ports(change), self._ports.apply))
        for part, apply in parts:
            if part:
                apply(part)

    def describe(self, key: RawKey, value: RawValue) -> list[str]:
        """Describe one object approximately as the nft program shows it."""
        if bridge_keys.is_bridged(key):
            return self._ports.describe(bridge_keys.plain(key), value)
        return super().describe(key, value)

    def element_texts(self, name: str, value: RawSet) -> Iterator[str]:
        """Yield the elements of the set of that name in the syntax of the nft program."""
        of_ranges = POLICY_TABLE.intervals.get(name)
        if of_ranges is not None:
            found = ranges(map(memoryview, value.elements), bool(of_ranges.flags & nft.SET_CONCAT))
        else:
            found = dict(map(key_and_data, value.elements))
        for key, data in found.items():
            yield element_text(name, key, data)
