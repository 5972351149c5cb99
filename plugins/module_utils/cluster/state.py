# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The objects of the cluster, indexed as ``serviceports`` reads them and updated one object at a time."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Optional

from ..base.addresses import FAMILIES, IPV4, IPV6
from ..base.errors import Refusal
from .account import RATES, Rates
from .api_addresses import KUBERNETES, NO_CLAIMS, leading_there, named_claims
from .claims import Claim, Claims, Conflicts, LostClaims
from .external_ranges import Confined, confined
from .files.static import StaticObjects
from .model import EndpointSlice, Failing, NamespacedName, Node, Service, ServiceCIDR
from .owned_slices import OwnedSlices, Slices
from .parsing.objects import ObjectKey, ParsedObject, object_key, parsed_object
from .parsing.policy_objects import KEPT_KINDS, POLICY_TYPES, PolicyObjects
from .service_limit import Limited, is_small, limited

_NOTHING: frozenset[NamespacedName] = frozenset()
_NO_SLICES: Slices = {}
_NO_ADDRESSES: frozenset[str] = frozenset()
_NO_FAMILIES: frozenset[str] = frozenset()
_EVERY_FAMILY: frozenset[str] = frozenset(FAMILIES)
_FAMILIES: Mapping[str, frozenset[str]] = {family: frozenset((family,)) for family in FAMILIES}

Rising = Mapping[tuple[str, int], int]
"""How many eighths of their weight endpoints have reached, by address and port; at least one."""
_NOT_RISING: Rising = {}


class ClusterState:
    """Services, the EndpointSlices of each, Nodes and ServiceCIDRs; what policies depend on; and the objects refused.

    ``kinds``: the kinds of all objects ever passed to :meth:`upsert`, valid or not, deleted since or not. ``policy``:
    Pods, Namespaces and network policies.

    The state depends only on the last version of each object: an invalid version replaces an earlier valid one, as if
    the object had been deleted. Network policies are the exception: the last valid version remains in force until the
    object is deleted, since pods would lose their protection otherwise.

    ``services`` are as they are served: without addresses outside of the operator's ranges (see ``external_ranges``),
    and if a Service is too large, without the parts that exceed its limit (see ``service_limit``). ``excess``: the
    bytes of memory that Services take in the mode in effect beyond what the size of their objects suggests; ``rates``:
    what objects cost in that mode.

    Static Services (:meth:`set_static`) are served beside those of the cluster. While there is a static Service of a
    name, the Service of the cluster with that name and its EndpointSlices are kept but not served.
    """

    def __init__(self) -> None:
        self.services: dict[NamespacedName, Service] = {}
        self.nodes: dict[str, Node] = {}
        #: The weights of Nodes other than 1, by name.
        self.node_weights: dict[str, int] = {}
        self.service_cidrs: dict[str, ServiceCIDR] = {}
        self._slices = OwnedSlices()
        self._slice_owners: dict[ObjectKey, NamespacedName] = {}
        self._refusals: dict[ObjectKey, Refusal] = {}
        self._nameless: dict[Refusal, None] = {}
        self._skipped: dict[ObjectKey, tuple[Refusal, ...]] = {}
        self.kinds: set[str] = set()
        self.policy = PolicyObjects()
        self._claims = Claims()
        self.given_servers = NO_CLAIMS
        self._external_ranges: tuple[str, ...] = ()
        #: The Services with addresses outside of these ranges.
        self.confined: dict[NamespacedName, Confined] = {}
        self._static = StaticObjects()
        self._failing: dict[NamespacedName, Failing] = {}
        self._rising: dict[NamespacedName, Rising] = {}
        self._limited: dict[NamespacedName, Limited] = {}
        self.rates = RATES["nftables"]
        self.excess = 0
        self._excess_of: dict[str, int] = {}
        #: Those of the limited Services of which parts are refused.
        self._cut: dict[NamespacedName, Limited] = {}
        self._withheld: dict[ObjectKey, Refusal] = {}
        self._node_weight = 1
        self._hidden_services: dict[NamespacedName, Service] = {}
        self._hidden_slices = OwnedSlices()

    @classmethod
    def from_objects(cls, objects: Iterable[Any]) -> ClusterState:
        """Return the state that raw objects (``kind`` included) describe; of several with one name the last wins."""
        state = cls()
        for raw in objects:
            state.upsert(raw)
        return state

    def successor(self) -> ClusterState:
        """Return a state that has all that was set, and what policies depend on, but no Services of the cluster."""
        state = ClusterState()
        state.kinds, state.policy = self.kinds, self.policy
        state._failing, state._rising = self._failing, self._rising
        state.rates, state._withheld = self.rates, self._withheld
        state.set_static(self._static)
        state.set_api_servers(self.given_servers)
        state.set_external_ranges(self._external_ranges)
        return state

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The objects that are skipped, in order of kind, namespace and name."""
        hidden = [
            Refusal("Service", key.namespace, key.name, "metadata.name", f"is that of a static Service of {file}")
            for key, file in ((key, self._static.services[key].static) for key in self._hidden_services)
        ]
        found = [*self._refusals.values(), *self._withheld.values(), *self._nameless, *hidden, *self._static.refusals]
        return tuple(sorted(found))

    @property
    def static_services(self) -> Mapping[NamespacedName, Service]:
        """Return the static Services."""
        return self._static.services

    @property
    def skipped(self) -> tuple[Refusal, ...]:
        """The parts of objects that were skipped because they are invalid, in order of kind, namespace and name."""
        parts = dict(self._skipped) if self._cut or self.confined else self._skipped
        refused = [(name, item.whole, item.reasons()) for name, item in self.confined.items()]
        refused += [(name, item.whole, list(item.refused)) for name, item in self._cut.items()]
        for name, service, reasons in refused:
            key = ObjectKey("Service", *name)
            parts[key] = (*parts.get(key, ()), *[Refusal(*key, *part, source=service.static) for part in reasons])
        return tuple(part for key in sorted(parts) for part in parts[key])

    @property
    def slices(self) -> Mapping[NamespacedName, Slices]:
        """A copy of the EndpointSlices by owning Service (which may not exist) and by name."""
        return dict(self._slices.items())

    def slices_of(self, service: NamespacedName) -> Slices:
        """Return the EndpointSlices that belong to a Service, by name; empty if there are none."""
        return self._slices.of(service)

    def families_of(self, key: ObjectKey) -> frozenset[str]:
        """Return the families that an object concerns; none if it is a Service or EndpointSlice that is absent."""
        if key.kind == "EndpointSlice":
            owner = self._slice_owners.get(key)
            item = None if owner is None else self._slices_by_owner(owner).get(owner, key.name)
            return _NO_FAMILIES if item is None else _FAMILIES[item.family]
        if key.kind == "Service":
            return self.families_of_service(NamespacedName(key.namespace, key.name))
        return _EVERY_FAMILY

    def families_of_service(self, key: NamespacedName) -> frozenset[str]:
        """Return the families of a Service's cluster IPs; none if it is absent."""
        service = self.services.get(key)
        if service is None:
            return _NO_FAMILIES
        if not service.cluster_ip_v4:
            return _FAMILIES[IPV6]
        return _EVERY_FAMILY if service.cluster_ip_v6 else _FAMILIES[IPV4]

    def lost_claims(self, service: NamespacedName) -> LostClaims:
        """Return the claims of a Service that were assigned to another Service; empty for nearly all Services."""
        return self._claims.lost_by(service)

    def reserved_addresses(self, service: Service) -> frozenset[str]:
        """Return the addresses of API servers that no interface of the node may get for a Service.

        A node with the address of an API server on an interface of its own does not reach that server at any port.
        None is reserved from a static Service, nor from one that leads to the API servers there.
        """
        if service.static:
            return _NO_ADDRESSES
        leading = self._claims.leading(service.key)
        return self._claims.server_addresses.difference([claim.address for claim in leading])

    @property
    def conflicts(self) -> Conflicts:
        """The claims that several Services make; the same object until one of them changes."""
        return self._claims.conflicts

    def service_cidr_list(self, family: str) -> tuple[str, ...]:
        """Return the CIDRs of one family of all ServiceCIDRs, sorted and without duplicates."""
        is_v6 = family == "IPv6"
        cidrs = {cidr for item in self.service_cidrs.values() for cidr in item.cidrs}
        return tuple(sorted(cidr for cidr in cidrs if (":" in cidr) == is_v6))

    def upsert(self, raw: Any) -> frozenset[NamespacedName]:
        """Add or replace a raw object and return the Services whose ServicePorts may change.

        Empty if nothing changes or Services do not depend on the object. An invalid object does not raise: it is
        recorded in ``refusals``.
        """
        return self.put(parsed_object(raw, object_key(raw)))

    def put(self, item: ParsedObject) -> frozenset[NamespacedName]:
        """Add or replace an object that is parsed already, like :meth:`upsert`."""
        key, parsed, skipped, is_supported = item
        if not is_supported:
            return _NOTHING
        self.kinds.add(key.kind)
        if skipped:
            self._skipped[key] = skipped
        elif self._skipped:
            self._skipped.pop(key, None)
        if isinstance(parsed, Refusal):
            if not key.kind or not key.name:
                self._nameless[parsed] = None
                return _NOTHING
            self._refusals[key] = parsed
            return _NOTHING if key.kind in KEPT_KINDS else self._remove(key)
        if self._refusals:
            self._refusals.pop(key, None)
        if isinstance(parsed, EndpointSlice):
            return self._put_slice(key, parsed)
        if isinstance(parsed, Service):
            return self._put_service(parsed)
        if isinstance(parsed, Node):
            self.nodes[parsed.name] = parsed
            self.policy.put_node(parsed)
            return self._weigh_node(parsed.name, parsed.weight)
        if isinstance(parsed, ServiceCIDR):
            self.service_cidrs[parsed.name] = parsed
            return _NOTHING
        if isinstance(parsed, POLICY_TYPES):
            self.policy.put(parsed)
            return _NOTHING
        return self._remove(key)

    def keeps_earlier(self, key: ObjectKey) -> bool:
        """Return whether an earlier version of an object is in force because the latest one was refused."""
        return key in self._refusals and key.kind in KEPT_KINDS and self.policy.holds(key)

    def delete(self, raw: Any) -> frozenset[NamespacedName]:
        """Remove a raw object (only kind, namespace and name are read) and return the Services affected."""
        return self.remove(object_key(raw))

    def remove(self, key: ObjectKey) -> frozenset[NamespacedName]:
        """Remove the object with this key and return the Services affected."""
        self._refusals.pop(key, None)
        self._skipped.pop(key, None)
        return self._remove(key)

    def set_api_servers(self, servers: frozenset[Claim]) -> frozenset[NamespacedName]:
        """Protect the addresses of these API servers, beside those that the cluster names; return Services affected."""
        self.given_servers = servers
        return self._protect_servers()

    def set_external_ranges(self, cidrs: tuple[str, ...]) -> frozenset[NamespacedName]:
        """Limit external addresses of Services of the cluster to these CIDRs, if any; return the Services affected."""
        if cidrs == self._external_ranges:
            return _NOTHING
        self._external_ranges = cidrs
        affected: set[NamespacedName] = set()
        for key in tuple(self.services):
            affected |= self._serve_again(key)
        return frozenset(affected)

    def set_static(self, static: StaticObjects) -> frozenset[NamespacedName]:
        """Serve these static Services instead of the earlier ones; return Services whose ServicePorts may change."""
        affected: set[NamespacedName] = set()
        before, self._static = self._static, static
        for key in before.services:
            if key not in static.services:
                affected |= self._replace_service(key, self._hidden_services.pop(key, None))
                self._slices.replace(key, self._hidden_slices.pop(key))
                affected.update((key, *self._fit(key)))
        for key, service in static.services.items():
            if key not in before.services:
                found = self._given(key)
                if found is not None:
                    self._hidden_services[key] = found
                self._hidden_slices.replace(key, self._slices.of(key))
            elif self._given(key) == service and self.slices_of(key) == static.slices.get(key, _NO_SLICES):
                continue
            affected |= self._replace_service(key, service)
            self._slices.replace(key, static.slices.get(key, _NO_SLICES))
            affected.update((key, *self._fit(key)))
        return frozenset(affected)

    def failing(self, service: NamespacedName) -> Optional[Failing]:
        """Return the endpoints of a Service that fail their health checks, None if all pass."""
        return self._failing.get(service)

    def set_failing(self, service: NamespacedName, failing: Failing) -> frozenset[NamespacedName]:
        """Record which endpoints of a Service fail; return the Services whose ServicePorts may change."""
        now = failing if failing.reasons else None
        if self._failing.get(service) == now:
            return _NOTHING
        if now is not None:
            self._failing[service] = now
        else:
            del self._failing[service]
        return frozenset((service,))

    def rising(self, service: NamespacedName) -> Rising:
        """Return the endpoints of a Service whose share still rises."""
        return self._rising.get(service, _NOT_RISING)

    def set_rising(self, service: NamespacedName, rising: Rising) -> frozenset[NamespacedName]:
        """Record the endpoints of a Service whose share still rises; return the Services that this changes."""
        if self.rising(service) == rising:
            return _NOTHING
        if rising:
            self._rising[service] = rising
        else:
            del self._rising[service]
        return frozenset((service,))

    def _protect_servers(self) -> frozenset[NamespacedName]:
        """Protect the addresses of the API servers known now; return the Services that claim one of them."""
        named = named_claims(self._slices_by_owner(KUBERNETES).get(KUBERNETES, KUBERNETES.name))
        servers = named | self.given_servers
        if servers == self._claims.servers:
            return _NOTHING
        affected = self._claims.set_servers(servers)
        for service in (*affected, *self.confined):
            affected |= self._serve_again(service)
        return frozenset(affected)

    def _leading(self, service: Service) -> frozenset[Claim]:
        """Return the claims of API servers that a Service makes as their load balancer."""
        if service.static:
            # It wins in any case.
            return NO_CLAIMS
        return leading_there(service, self.slices_of(service.key), self._claims.servers)

    def _endpoints_changed(self, owner: NamespacedName) -> frozenset[NamespacedName]:
        """Return the Services whose ServicePorts may change with the EndpointSlices of a Service."""
        affected = self._served(owner)
        return affected | self._protect_servers() if owner == KUBERNETES else affected

    def _given(self, key: NamespacedName) -> Optional[Service]:
        """Return a Service that is served, with the parts that are refused; None if there is none."""
        found = self.confined.get(key) or self._limited.get(key)
        return self.services.get(key) if found is None else found.whole

    def _replace_service(self, key: NamespacedName, service: Optional[Service]) -> set[NamespacedName]:
        """Serve this Service within ranges and limit, None for none; return the other Services affected."""
        before, now = self.services.get(key), self._within_limit(key, self._within_ranges(key, service))
        leading = self._leading(now) if now is not None else NO_CLAIMS
        if now == before and leading == self._claims.leading(key):
            return set()
        affected = self._claims.replace(key, before, now, leading)
        if now is not None:
            self.services[key] = now
        else:
            del self.services[key]
        return affected

    def _serve_again(self, key: NamespacedName) -> set[NamespacedName]:
        """Serve a Service as settings and API servers now demand; return the Services affected."""
        before = self.services.get(key)
        affected = self._replace_service(key, self._given(key))
        return affected if self.services.get(key) == before else affected | {key}

    def _within_ranges(self, key: NamespacedName, service: Optional[Service]) -> Optional[Service]:
        self.confined.pop(key, None)
        if service is None or not self._external_ranges:
            return service
        found = confined(service, self._external_ranges, self._leading(service))
        if found is None:
            return service
        self.confined[key] = found
        return found.served

    def _within_limit(self, key: NamespacedName, service: Optional[Service]) -> Optional[Service]:
        before = self._limited.pop(key, None) if self._limited else None
        if before is not None:
            self._cut.pop(key, None)
            self._take(key.namespace, -before.excess)
        if service is None or self._is_small(service):
            return service
        now = limited(service, self._slices.counts_of(key), self.rates, self._node_weight)
        if now is None:
            return service
        self._limited[key] = now
        if now.refused:
            self._cut[key] = now
        self._take(key.namespace, now.excess)
        return now.served

    def _is_small(self, service: Service) -> bool:
        return is_small(service) and not self.node_weights and not self._slices.have_weights(service.key)

    def _take(self, namespace: str, excess: int) -> None:
        if excess:
            self.excess += excess
            now = self._excess_of.pop(namespace, 0) + excess
            if now:
                self._excess_of[namespace] = now

    def _fit(self, key: NamespacedName) -> set[NamespacedName]:
        """Serve what a Service may have with its present EndpointSlices; return the other Services affected."""
        service = self._given(key)
        if service is None or (key not in self._limited and self._is_small(service)):
            return set()
        return self._replace_service(key, service)

    def _fit_all(self) -> set[NamespacedName]:
        affected = set(self.services)
        for key in tuple(self.services):
            affected |= self._fit(key)
        return affected

    def set_rates(self, rates: Rates) -> None:
        """Account Services as those of this mode from now on. What is served is the same in every mode."""
        if rates != self.rates:
            self.rates = rates
            self._fit_all()

    def withhold(self, key: ObjectKey, reason: str) -> None:
        """Report that the latest version of an object is not in force, until it is admitted."""
        self._withheld[key] = Refusal(*key, "", reason)

    def admit(self, key: ObjectKey) -> None:
        """End the report about an object that was withheld."""
        if self._withheld:
            self._withheld.pop(key, None)

    def excess_of(self, namespace: str) -> int:
        """Return the excess of the Services of a namespace."""
        return self._excess_of.get(namespace, 0)

    def entries_of(self, service: NamespacedName) -> int:
        """Return the entries of a Service in the mode in effect; 0 if there are not more than its objects suggest."""
        found = self._limited.get(service)
        return found.entries if found is not None else 0

    def _put_service(self, service: Service) -> frozenset[NamespacedName]:
        key = service.key
        if key in self._static.services:
            self._hidden_services[key] = service
            return _NOTHING
        if self._given(key) == service:
            return _NOTHING
        return frozenset((key, *self._replace_service(key, service)))

    def _put_slice(self, key: ObjectKey, item: EndpointSlice) -> frozenset[NamespacedName]:
        owner = item.service_key
        table = self._slices_by_owner(owner)
        affected = _NOTHING
        if self._slice_owners.get(key) != owner:
            affected = self._drop_slice(key)
            self._slice_owners[key] = owner
        elif table.get(owner, item.name) == item:
            return _NOTHING
        table.put(owner, item)
        return affected | self._endpoints_changed(owner)

    def _drop_slice(self, key: ObjectKey) -> frozenset[NamespacedName]:
        owner: Optional[NamespacedName] = self._slice_owners.pop(key, None)
        if owner is None:
            return _NOTHING
        self._slices_by_owner(owner).drop(owner, key.name)
        return self._endpoints_changed(owner)

    def _slices_by_owner(self, owner: NamespacedName) -> OwnedSlices:
        """Return the table with the cluster's slices of a Service; it is not served if a static Service hides it."""
        return self._hidden_slices if owner in self._static.services else self._slices

    def _weigh_node(self, name: str, weight: int) -> frozenset[NamespacedName]:
        """Record the weight of a Node; if it differs, return the Services with endpoints on that Node."""
        if self.node_weights.get(name, 1) == weight:
            return _NOTHING
        if weight == 1:
            del self.node_weights[name]
        else:
            self.node_weights[name] = weight
        most = max(self.node_weights.values(), default=1)
        if most != self._node_weight:
            # What a Service makes depends on it.
            self._node_weight = max(1, most)
            return frozenset(self._fit_all())
        return frozenset(
            owner
            for owner, slices in self._slices.items()
            if any(endpoint.node_name == name for item in slices.values() for endpoint in item.endpoints)
        )

    def _served(self, service: NamespacedName) -> frozenset[NamespacedName]:
        return _NOTHING if service in self._static.services else frozenset((service, *self._fit(service)))

    def _remove(self, key: ObjectKey) -> frozenset[NamespacedName]:
        if key.kind == "EndpointSlice":
            return self._drop_slice(key)
        if key.kind == "Service":
            service = NamespacedName(key.namespace, key.name)
            if service in self._static.services:
                self._hidden_services.pop(service, None)
                return _NOTHING
            found = service in self.services
            return frozenset((service, *self._replace_service(service, None))) if found else _NOTHING
        if key.kind == "Node":
            self.nodes.pop(key.name, None)
            self.policy.remove(key)
            return self._weigh_node(key.name, 1)
        if key.kind == "ServiceCIDR":
            self.service_cidrs.pop(key.name, None)
        else:
            self.policy.remove(key)
        return _NOTHING
