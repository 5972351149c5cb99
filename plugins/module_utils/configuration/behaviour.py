# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The choice between kube-proxy's defects and corrected behaviour.

kube-proxy deviates from the API documentation and the KEPs in places, and its modes differ from each other. A node can
be taken over only if nothing changes for clients that depend on this, so it is the default. Each deviation that can be
corrected is one predicate of :class:`Behaviour`, true if it is corrected; code checks the predicate, never the name.
"""

from __future__ import annotations

from typing import NamedTuple


class Behaviour(NamedTuple):
    """The deviations of kube-proxy that are corrected."""

    #: As in the configuration.
    name: str
    #: ipvs mode: pods and the node reach the endpoints of all nodes through external addresses and node ports with
    #: externalTrafficPolicy Local (KEP-1669), masqueraded only for the node.
    inside_reaches_all: bool = False
    #: ipvs mode: a traffic policy Local without local endpoints drops instead of using other nodes (API documentation;
    #: KEP-2086).
    local_means_local: bool = False
    #: ipvs mode: UDP and SCTP flows stay at an endpoint that is terminating and still serves (KEP-1669).
    terminating_keep_flows: bool = False
    #: ipvs mode: the node's own ports, including health check node ports, do not answer on service addresses.
    virtual_addresses_are_closed: bool = False
    #: ipvs mode: the source of a packet decides for connections of the node, too.
    ranges_hold_for_node: bool = False
    #: loadBalancerSourceRanges restrict the node ports of the Service as well.
    ranges_hold_for_node_ports: bool = False
    #: Ranges of one family alone allow no source of the other family.
    ranges_hold_for_families: bool = False
    #: iptables mode: a source that is not allowed is dropped, even without endpoints.
    ranges_before_endpoints: bool = False
    #: Connection tracking entries of SCTP flows are deleted like those of UDP flows, and those of both also when their
    #: Service, or its address, was created later.
    stale_flows_end: bool = False
    #: ipvs mode: while the endpoint that the scheduler mh or sh selects for a client gets no new connections, because
    #: it drains or is in maintenance, the client gets another one.
    hashing_falls_back: bool = False
    #: Masquerading uses no source port that can be a node port.
    masquerade_below_node_ports: bool = False
    #: Of several EndpointSlices with one endpoint, the one that was changed last decides about it.
    later_slice_decides: bool = False


#: The release of kube-proxy whose behaviour this is where nothing is corrected.
KUBE_PROXY_RELEASE = "1.38"
KUBE_PROXY = Behaviour("kube-proxy")
CORRECTED = Behaviour("corrected", *(True for _hole in Behaviour._fields[1:]))

BEHAVIOURS: dict[str, Behaviour] = {item.name: item for item in (KUBE_PROXY, CORRECTED)}

#: The default of the API server's option --service-node-port-range.
NODE_PORTS = (30000, 32767)
_PORTS = (1024, 65535)


def masquerade_ports(node_ports: tuple[int, int] = NODE_PORTS) -> tuple[int, int]:
    """Return the larger range of unprivileged ports, first and last, beside the range of node ports."""
    below, above = (_PORTS[0], node_ports[0] - 1), (node_ports[1] + 1, _PORTS[1])
    return max(below, above, key=lambda ports: ports[1] - ports[0])
