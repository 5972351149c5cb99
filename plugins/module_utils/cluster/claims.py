# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decide which Service gets an address and port that several Services claim.

In kube-proxy the result is arbitrary, so anyone who may write spec.externalIPs can hijack the cluster IP of another
tenant (CVE-2020-8554). Here a cluster IP wins over a load balancer address, and that over an external IP; then the
older Service wins, and finally the first by namespace and name. Node ports are also assigned by age.

A static Service (see ``static``) is defined by the operator of the node and wins over any Service of the cluster, so
that a tenant cannot hijack, for example, the address of the API servers.

The addresses of the API servers themselves (see ``api_addresses``) are no load balancer addresses or external IPs of
Services of the cluster, except load balancer addresses of a Service whose endpoints are the API servers.
"""

from __future__ import annotations

from bisect import insort
from typing import Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

from ..addresses import FAMILIES, address_and_port, family_of
from .model import NamespacedName, Service

_CLUSTER_IP, _FOR_API_SERVERS, _API_SERVER, _LOAD_BALANCER, _EXTERNAL_IP, _NODE_PORT = range(6)
_KINDS = (
    "cluster IP",
    "load balancer address of the API servers",
    "API server",
    "load balancer address",
    "external IP",
    "node port",
)
#: Sorts after every time: a Service without a creation time counts as the youngest.
_YOUNGEST = "~"


class Claim(NamedTuple):
    """An address, port and protocol, on which at most one Service can be served.

    For a node port, ``address`` is the family (IPv4 or IPv6): a node port is the same on all addresses of the node.
    """

    address: str
    port: int
    protocol: str

    def __str__(self) -> str:
        if self.address in FAMILIES:
            return f"node port {self.port}/{self.protocol} ({self.address})"
        return f"{address_and_port(self.address, self.port)}/{self.protocol}"


class _Claimant(NamedTuple):
    """A Service that makes a claim. The order of the fields is the rule: the smallest claimant gets the address."""

    of_cluster: bool
    kind: int
    created: str
    name: NamespacedName

    def __str__(self) -> str:
        return f"{'Service' if self.of_cluster else 'static Service'} {self.name} ({_KINDS[self.kind]})"


#: Claims the addresses of the API servers. It is no Service, so it never is a loser.
_API_SERVERS = _Claimant(True, _API_SERVER, "", NamespacedName("", "API servers"))


class Conflict(NamedTuple):
    """A claim, the Service that wins it, and one that does not. The winner has no namespace if it is an API server."""

    claim: Claim
    winner: NamespacedName
    loser: NamespacedName
    reason: str

    def __str__(self) -> str:
        return self.reason


_Claimants = Union[_Claimant, List[_Claimant]]
_NOTHING: Mapping[Claim, Conflict] = {}
_NONE: FrozenSet[Claim] = frozenset()


def _claims_of(name: NamespacedName, service: Optional[Service], leading: FrozenSet[Claim]) -> Dict[Claim, _Claimant]:
    """Return the claims of the Service with this name in the families in which it has a cluster IP.

    ``leading``: those of its load balancer addresses that are addresses of the API servers, to which it leads.
    """
    claims: Dict[Claim, _Claimant] = {}
    if service is None:
        return claims
    of_cluster, created = not service.static, service.created or _YOUNGEST
    served = [(family, ip) for family, ip in zip(FAMILIES, (service.cluster_ip_v4, service.cluster_ip_v6)) if ip]
    families = [family for family, _ip in served]
    by_kind = [
        (_CLUSTER_IP, [ip for _family, ip in served]),
        (_LOAD_BALANCER, [address for address in service.load_balancer_ips if family_of(address) in families]),
        (_EXTERNAL_IP, [address for address in service.external_ips if family_of(address) in families]),
    ]
    for kind, addresses in by_kind:
        if addresses:
            claimant = _Claimant(of_cluster, kind, created, name)
            for address in addresses:
                for port in service.ports:
                    # The first kind is the strongest one.
                    claims.setdefault(Claim(address, port.port, port.protocol), claimant)
    for claim in leading:
        # A load balancer may have an address of a family in which the Service has no cluster IP.
        leader = claims.get(claim)
        if leader is not None and leader.kind == _LOAD_BALANCER:
            claims[claim] = leader._replace(kind=_FOR_API_SERVERS)
    node_ports = [port for port in service.ports if port.node_port]
    if node_ports:
        claimant = _Claimant(of_cluster, _NODE_PORT, created, name)
        for port in node_ports:
            for family in families:
                claims[Claim(family, port.node_port, port.protocol)] = claimant
    return claims


class Claims:
    """The claims of all Services, kept up to date one Service at a time at a cost of O(its claims)."""

    def __init__(self) -> None:
        # Nearly all claims are made by one Service; these are stored without a list.
        self._claimants: Dict[Claim, _Claimants] = {}
        self._lost: Dict[NamespacedName, Dict[Claim, Conflict]] = {}
        self._servers = _NONE
        self._leading: Dict[NamespacedName, FrozenSet[Claim]] = {}
        self._conflicts: Optional[Tuple[Conflict, ...]] = ()

    def lost_by(self, service: NamespacedName) -> Mapping[Claim, Conflict]:
        """Return the claims that a Service loses to another one; empty for nearly all Services."""
        return self._lost.get(service, _NOTHING)

    @property
    def conflicts(self) -> Tuple[Conflict, ...]:
        """All claims that one Service loses to another one, sorted by claim and winner.

        The same object until one of them changes.
        """
        if self._conflicts is None:
            self._conflicts = tuple(sorted(conflict for lost in self._lost.values() for conflict in lost.values()))
        return self._conflicts

    @property
    def servers(self) -> FrozenSet[Claim]:
        """The addresses of the API servers."""
        return self._servers

    def leading(self, service: NamespacedName) -> FrozenSet[Claim]:
        """Return the claims of API servers that a Service makes as their load balancer."""
        return self._leading.get(service, _NONE)

    def set_servers(self, servers: FrozenSet[Claim]) -> Set[NamespacedName]:
        """Replace the addresses of the API servers; return the Services that claim one of the earlier or later ones."""
        before, self._servers = self._servers, servers
        for claim in before - servers:
            self._change(claim, _API_SERVERS, None)
        for claim in servers - before:
            self._change(claim, None, _API_SERVERS)
        return {name for claim in before | servers for name in self._names(claim)}

    def _names(self, claim: Claim) -> Set[NamespacedName]:
        """Return the Services that make a claim."""
        found = self._claimants.get(claim, [])
        claimants = found if isinstance(found, list) else [found]
        return {claimant.name for claimant in claimants if claimant is not _API_SERVERS}

    def replace(
        self,
        name: NamespacedName,
        before: Optional[Service],
        now: Optional[Service],
        leading: FrozenSet[Claim] = _NONE,
    ) -> Set[NamespacedName]:
        """Replace the claims of a Service by those of its new version, and return the other Services affected.

        ``before`` is None for a new Service, ``now`` for a deleted one. ``leading``: the claims of API servers that it
        makes as their load balancer. A Service is affected if it loses a claim, or wins one that it had lost.
        """
        old, new = _claims_of(name, before, self._leading.pop(name, _NONE)), _claims_of(name, now, leading)
        if leading:
            self._leading[name] = leading
        affected: Set[NamespacedName] = set()
        for claim in {**old, **new} if old else new:
            removed, added = old.get(claim), new.get(claim)
            if removed != added:
                affected |= self._change(claim, removed, added)
        affected.discard(name)
        return affected

    def _change(self, claim: Claim, removed: Optional[_Claimant], added: Optional[_Claimant]) -> Set[NamespacedName]:
        found = self._claimants.get(claim)
        if removed is None and added is not None and found is None:
            self._claimants[claim] = added
            return set()
        if added is None and not isinstance(found, list):
            del self._claimants[claim]
            return set()
        claimants = found if isinstance(found, list) else [found] if found is not None else []
        before = {claimant.name for claimant in claimants}
        losers_before = {claimant.name for claimant in claimants[1:] if claimant is not _API_SERVERS}
        if removed is not None:
            claimants.remove(removed)
        if added is not None:
            insort(claimants, added)
        self._claimants[claim] = claimants if len(claimants) > 1 else claimants[0]
        losers = {claimant.name for claimant in claimants[1:] if claimant is not _API_SERVERS}
        self._record(claim, before, claimants)
        return losers ^ losers_before

    def _record(self, claim: Claim, before: Set[NamespacedName], claimants: List[_Claimant]) -> None:
        """Record the conflicts of a claim; ``before`` are the names of its claimants before the change."""
        self._conflicts = None
        for name in before:
            lost = self._lost.get(name)
            if lost is not None and lost.pop(claim, None) is not None and not lost:
                del self._lost[name]
        winner = claimants[0]
        for loser in claimants[1:]:
            if loser is _API_SERVERS:
                continue
            reason = f"{claim} is claimed by {winner} and {loser}; {winner.name} gets it"
            if winner is _API_SERVERS:
                reason = f"{claim} is claimed by {loser}, but is the address of an API server and remains that"
            self._lost.setdefault(loser.name, {})[claim] = Conflict(claim, winner.name, loser.name, reason)
