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

from bisect import bisect_left, insort
from itertools import islice
from typing import Iterator, Mapping, NamedTuple, Optional, Union

from ..base.addresses import FAMILIES, address_and_port, family_of
from .model import YOUNGEST, NamespacedName, Service

_CLUSTER_IP, _FOR_API_SERVERS, _API_SERVER, _LOAD_BALANCER, _EXTERNAL_IP, _NODE_PORT = range(6)
_KINDS = (
    "cluster IP",
    "load balancer address of the API servers",
    "API server",
    "load balancer address",
    "external IP",
    "node port",
)


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

    @property
    def shown(self) -> tuple[bool, int, NamespacedName]:
        """What the text depends on."""
        return self.of_cluster, self.kind, self.name


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


_Contest = tuple[_Claimant, ...]
"""The Service that wins a claim, or the API servers, and then the Services that lose it, in any order."""
_NO_CONTEST: _Contest = ()


class Conflicts:
    """The claims that Services lose at one moment, by claim, winner and loser.

    A Service may lose each of its claims to each of many others, so a conflict is only made when it is requested.
    """

    def __init__(self, contests: Mapping[Claim, _Contest]) -> None:
        self._contests = contests
        self._count = sum(map(len, contests.values())) - len(contests)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Conflict]:
        for claim, (winner, *losers) in self._contests.items():
            for loser in sorted(losers, key=lambda claimant: claimant.name):
                yield _conflict(claim, winner, loser)

    def first(self, count: int) -> list[Conflict]:
        """Return the first conflicts, at most as many as given."""
        return list(islice(self, count))

    def updated(self, changed: Mapping[Claim, _Contest]) -> Conflicts:
        """Return the conflicts after a change of these claims; the contest of one that is no longer lost is empty."""
        contests = sorted({**self._contests, **changed}.items())
        return Conflicts({claim: contest for claim, contest in contests if contest})

    def since(self, earlier: Conflicts) -> Conflicts:
        """Return the conflicts that were not among the earlier ones in the same words."""
        found = {
            claim: _new_part(contest, earlier._contests.get(claim, _NO_CONTEST))
            for claim, contest in self._contests.items()
        }
        return Conflicts({claim: contest for claim, contest in found.items() if contest})


NO_CONFLICTS = Conflicts({})


def _conflict(claim: Claim, winner: _Claimant, loser: _Claimant) -> Conflict:
    reason = f"{claim} is claimed by {winner} and {loser}; {winner.name} gets it"
    if winner is _API_SERVERS:
        reason = f"{claim} is claimed by {loser}, but is the address of an API server and remains that"
    return Conflict(claim, winner.name, loser.name, reason)


def _new_part(contest: _Contest, earlier: _Contest) -> _Contest:
    """Return the winner of a claim and those who lose it to that winner only now; empty if there are none."""
    if contest == earlier:
        return _NO_CONTEST
    winner, *losers = contest
    if not earlier or earlier[0].shown != winner.shown:
        return contest
    # Nearly all claimants are in both.
    gone = {claimant.shown for claimant in set(earlier).difference(contest)}
    new = [loser for loser in set(losers).difference(earlier) if loser.shown not in gone]
    return (winner, *new) if new else _NO_CONTEST


_Claimants = Union[_Claimant, list[_Claimant]]
_NONE: frozenset[Claim] = frozenset()


class LostClaims:
    """Which of its own claims a Service loses to another one; false if it gets all of them."""

    def __init__(self, name: NamespacedName, count: int, claimants: Mapping[Claim, _Claimants]) -> None:
        self._name = name
        self._count = count
        self._claimants = claimants

    def __len__(self) -> int:
        return self._count

    def __contains__(self, claim: Claim) -> bool:
        """Return whether the Service loses a claim that it makes."""
        found = self._claimants.get(claim)
        return isinstance(found, list) and found[0].name != self._name


_LOSES_NOTHING = LostClaims(NamespacedName("", ""), 0, {})


def _claims_of(name: NamespacedName, service: Optional[Service], leading: frozenset[Claim]) -> dict[Claim, _Claimant]:
    """Return the claims of the Service with this name in the families in which it has a cluster IP.

    ``leading``: those of its load balancer addresses that are addresses of the API servers, to which it leads.
    """
    claims: dict[Claim, _Claimant] = {}
    if service is None:
        return claims
    of_cluster, created = not service.static, service.created or YOUNGEST
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
    """The claims of all Services, kept up to date one Service at a time.

    The cost is O(its claims), however many others make the same ones: tenants choose how many do.
    """

    def __init__(self) -> None:
        # Nearly all claims are made by one Service; these are stored without a list. A list is sorted.
        self._claimants: dict[Claim, _Claimants] = {}
        #: How many claims each Service loses, if any.
        self._lost: dict[NamespacedName, int] = {}
        #: The addresses of the API servers.
        self.servers = _NONE
        #: Their addresses alone: a Service at another port of one does not lose it.
        self.server_addresses: frozenset[str] = frozenset()
        self._leading: dict[NamespacedName, frozenset[Claim]] = {}
        self._conflicts = NO_CONFLICTS
        #: The claims with several claimants that have changed since the conflicts were determined.
        self._changed: set[Claim] = set()

    def lost_by(self, service: NamespacedName) -> LostClaims:
        """Return the claims that a Service loses to another one; empty for nearly all Services."""
        count = self._lost.get(service)
        return LostClaims(service, count, self._claimants) if count else _LOSES_NOTHING

    @property
    def conflicts(self) -> Conflicts:
        """All claims that one Service loses to another one. The same object until one of them changes."""
        if self._changed:
            self._conflicts = self._conflicts.updated({claim: self._contest(claim) for claim in self._changed})
            self._changed = set()
        return self._conflicts

    def _contest(self, claim: Claim) -> _Contest:
        """Return who wins and who loses a claim; empty if no Service loses it."""
        found = self._claimants.get(claim)
        if not isinstance(found, list):
            return _NO_CONTEST
        contest = (found[0], *[claimant for claimant in found[1:] if claimant is not _API_SERVERS])
        return contest if len(contest) > 1 else _NO_CONTEST

    def leading(self, service: NamespacedName) -> frozenset[Claim]:
        """Return the claims of API servers that a Service makes as their load balancer."""
        return self._leading.get(service, _NONE)

    def set_servers(self, servers: frozenset[Claim]) -> set[NamespacedName]:
        """Replace the addresses of the API servers; return the Services at one of the earlier or later ones."""
        before, self.servers = self.servers, servers
        addresses = frozenset(claim.address for claim in servers)
        changed, self.server_addresses = self.server_addresses ^ addresses, addresses
        others = [claim for claim in self._claimants if claim.address in changed] if changed else []
        for claim in before - servers:
            self._change(claim, _API_SERVERS, None)
        for claim in servers - before:
            self._change(claim, None, _API_SERVERS)
        return {name for claim in (*before, *servers, *others) for name in self._names(claim)}

    def _names(self, claim: Claim) -> set[NamespacedName]:
        """Return the Services that make a claim."""
        found = self._claimants.get(claim, [])
        claimants = found if isinstance(found, list) else [found]
        return {claimant.name for claimant in claimants if claimant is not _API_SERVERS}

    def replace(
        self, name: NamespacedName, before: Optional[Service], now: Optional[Service], leading: frozenset[Claim] = _NONE
    ) -> set[NamespacedName]:
        """Replace the claims of a Service by those of its new version, and return the other Services affected.

        ``before`` is None for a new Service, ``now`` for a deleted one. ``leading``: the claims of API servers that it
        makes as their load balancer. A Service is affected if it loses a claim, or wins one that it had lost.
        """
        old, new = _claims_of(name, before, self._leading.pop(name, _NONE)), _claims_of(name, now, leading)
        if leading:
            self._leading[name] = leading
        affected: set[NamespacedName] = set()
        for claim in {**old, **new} if old else new:
            removed, added = old.get(claim), new.get(claim)
            if removed != added:
                affected |= self._change(claim, removed, added)
        affected.discard(name)
        return affected

    def _change(self, claim: Claim, removed: Optional[_Claimant], added: Optional[_Claimant]) -> set[NamespacedName]:
        """Replace a claimant; return the Services that lose the claim only before or only after that."""
        found = self._claimants.get(claim)
        if removed is None and added is not None and found is None:
            self._claimants[claim] = added
            return set()
        if added is None and not isinstance(found, list):
            del self._claimants[claim]
            return set()
        claimants = found if isinstance(found, list) else [found] if found is not None else []
        before = claimants[0]
        if removed is not None:
            del claimants[claimants.index(removed, bisect_left(claimants, removed))]
        if added is not None:
            insort(claimants, added)
        after = claimants[0]
        self._claimants[claim] = claimants if len(claimants) > 1 else after
        if len(claimants) > 1 or isinstance(found, list):
            self._changed.add(claim)
        # All others lose the claim both before and after the change.
        lost = _losers(before, removed, after if after != added else None)
        return self._count_lost(lost, _losers(after, added, before if before != removed else None))

    def _count_lost(self, before: set[NamespacedName], after: set[NamespacedName]) -> set[NamespacedName]:
        """Count a claim for the Services that begin or cease to lose it; return these Services."""
        for name in after - before:
            self._lost[name] = self._lost.get(name, 0) + 1
        for name in before - after:
            left = self._lost.pop(name) - 1
            if left:
                self._lost[name] = left
        return before ^ after


def _losers(winner: _Claimant, *claimants: Optional[_Claimant]) -> set[NamespacedName]:
    """Return the Services among these claimants that do not win."""
    services = (claimant for claimant in claimants if claimant is not None and claimant is not _API_SERVERS)
    return {claimant.name for claimant in services if claimant.name != winner.name}
