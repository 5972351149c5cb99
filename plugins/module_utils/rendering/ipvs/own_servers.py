# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which virtual servers are ours. IPVS does not mark ownership, so the elements of the filter backend are the record.

Every virtual server of a Service has an element in a set of frontends or of node ports, in both filter backends.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Optional

from ...base.addresses import unpacked
from ..nftables.objects import PROTOCOL_NAMES, ElementKey, ObjectKey
from .model import SetElementKey, VirtualServerKey
from .nftables_layout import FRONTENDS, IPVS_TABLE, NODE_PORTS
from .sets import CLUSTER_IP, EXTERNAL_IP, EXTERNAL_IP_LOCAL, LOAD_BALANCER, NAMES, PROTOCOL_OF_NODE_PORTS

_FRONTENDS = (CLUSTER_IP, EXTERNAL_IP, EXTERNAL_IP_LOCAL, LOAD_BALANCER)
_FRONTEND_IPSETS = frozenset(names[name] for names in NAMES.values() for name in _FRONTENDS)
#: The sets of the table beside IPVS whose elements are the record.
RECORD_SETS = frozenset((NODE_PORTS, *(FRONTENDS[name] for name in _FRONTENDS)))
#: Protocol and port, each padded to four bytes.
_PORT_BYTES = 8


def recorded_server(key: Any) -> Optional[VirtualServerKey]:
    """Return the virtual server that an element records, or None; that of a node port has no address.

    ``key``: of an element of an ipset or of the table beside IPVS, or of anything else, which records none.
    """
    if isinstance(key, SetElementKey):
        if key.set in PROTOCOL_OF_NODE_PORTS:
            return VirtualServerKey(PROTOCOL_OF_NODE_PORTS[key.set], "", int(key.element.rsplit(":", 1)[-1]))
        if key.set in _FRONTEND_IPSETS:
            address, _comma, port = key.element.partition(",")
            protocol, _colon, number = port.partition(":")
            # Another program may have added an element that is not about a port, such as one of ICMP.
            return VirtualServerKey(protocol, address, int(number)) if number.isdigit() else None
    if isinstance(key, ElementKey) and key.name in RECORD_SETS and len(key.key) >= _PORT_BYTES:
        raw, transport = key.key[:-_PORT_BYTES], key.key[-_PORT_BYTES:]
        name = PROTOCOL_NAMES.get(transport[0])
        place = unpacked(raw) if raw else ""
        return VirtualServerKey(name, place, int.from_bytes(transport[4:6], "big")) if name else None
    return None


def server_record(observed: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the part of the table beside IPVS that records virtual servers and does not affect packets."""
    found = (IPVS_TABLE.key, *(ObjectKey("set", name) for name in RECORD_SETS))
    return {key: value for key, value in observed.items() if key in found or recorded_server(key)}


class OwnServers:
    """The virtual servers that are ours: all decisions about it are made here.

    One is ours if an element records it. A node port is recorded without an address: the node may have lost the address
    meanwhile. Where no element records an address of the dummy device, since another program has emptied the sets, all
    virtual servers of the address are ours.
    """

    def __init__(
        self, elements: Iterable[Any], bound: Iterable[str], at_node_ports: Optional[Iterable[str]] = None
    ) -> None:
        """Take the elements of the filter backends, and the addresses on the dummy device.

        ``at_node_ports``: the addresses at which virtual servers of node ports are ours; None for any.
        """
        self._recorded = frozenset(filter(None, map(recorded_server, elements)))
        self._bound = frozenset(bound).difference(server.address for server in self._recorded)
        self._at_node_ports = None if at_node_ports is None else frozenset(at_node_ports)

    def __contains__(self, server: object) -> bool:
        """Return whether a virtual server is ours."""
        if not isinstance(server, VirtualServerKey):
            return False
        if server in self._recorded or server.address in self._bound:
            return True
        anywhere = self._at_node_ports is None or server.address in self._at_node_ports
        return anywhere and server._replace(address="") in self._recorded
