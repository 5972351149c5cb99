# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render a mode: pure functions from ServicePorts to entries, and the fold of a whole cluster.

A mode renders the static part of its tables and each ServicePort to *entries* (table, key, value). Two folds merge
entries into desired tables: :meth:`Rendering.desired_tables` renders a whole cluster at once, for a one-shot
convergence; :class:`.desired.DesiredTables` follows one Service at a time, for the agent. Both use the same functions
for every decision, so they produce the same tables.
"""

from __future__ import annotations

from typing import Any, Generic, Mapping, Optional, Sequence, TypeVar

from ..serviceports.info import Endpoint, ServicePortInfo, ServicePortName
from ..serviceports.weights import shares
from .merged import Entry, Journal, MergedTables
from .settings import Arrival, Client, DataplaneSettings, Masquerade, Shares, masquerade_external, masquerade_internal

Tables = dict[str, dict[Any, Any]]
ServicePorts = Mapping[ServicePortName, ServicePortInfo]
Context = TypeVar("Context")


class Derivation:
    """Computes the entries that follow from all contributions together; this base class has none.

    An instance belongs to one set of tables, and may remember what it derived last.
    """

    def whole(self, tables: Tables) -> None:
        """Add the entries derived from the contributions in ``tables``, which are complete."""

    def update(self, merged: MergedTables, journal: Journal) -> None:
        """Update the entries derived from the keys in the journal; auxiliary tables are removed from it."""


#: With slow start, nodes that see an endpoint at different times would send a client to different endpoints meanwhile.
NO_SLOW_START = "slow start is not used where a client's address determines its endpoint"


class Rendering(Generic[Context]):
    """The pure half of a mode."""

    #: The mode's name, as in a KubeProxyConfiguration.
    name: str = ""
    #: The tables that resources hold, in order of dependence: additions are applied in this order and removals in the
    #: reverse one.
    tables: tuple[str, ...] = ()
    #: Further tables that entries contribute to, from which a derivation computes entries of the others.
    parts: tuple[str, ...] = ()
    #: :meth:`at_size` depends on the number of endpoints.
    counts_endpoints: bool = False
    #: Entries of a ServicePort that can be reached from outside depend on the addresses of the node.
    entries_have_addresses: bool = False
    #: How clients without an endpoint are refused, in words.
    refused_with: str = "ICMP port unreachable"
    #: Endpoints never see the client's address.
    replaces_source: bool = False
    #: How the mode chooses an endpoint, as annotations name it.
    scheduler: str = "random"
    #: The most lists of slots for stable hashing in the tables of a family, and of one Service (see
    #: :mod:`.slot_limit`).
    most_lists: int = 0
    most_lists_of_service: int = 0
    #: The agent itself forwards connections.
    forwards: bool = False
    #: Ports of a cluster IP that no Service has are refused.
    closes_cluster_ips: bool = True
    #: What happens to the source address of internal traffic without a detectLocalMode, in words.
    source_without_detector: str = "kept (without a detectLocalMode this node's pods are unknown)"

    # ---- tables: from settings and ServicePorts to entries

    def at_size(self, settings: DataplaneSettings, endpoints: int) -> DataplaneSettings:
        """Return the settings with the decisions that depend on all Services of the family together.

        ``endpoints``: of all ServicePorts, whatever their conditions.
        """
        return settings

    def settings_in_use(self, settings: DataplaneSettings) -> DataplaneSettings:
        """Return the settings without those the mode does not use, for comparison.

        Addresses count as a set; the interface of each does not matter. Where node ports answer on all addresses, no
        list of them is used.
        """
        chosen = settings.node_port_addresses if settings.node_port_cidrs else ()
        return settings._replace(node_addresses=(), node_port_addresses=tuple(sorted(set(chosen))))

    def context(self, settings: DataplaneSettings) -> Context:
        """Return the values that rendering needs in addition to a ServicePort, computed once.

        Raises ConfigurationError for settings that cannot be rendered.
        """
        raise NotImplementedError(self.name)

    def static_entries(self, context: Context) -> list[Entry]:
        """Return the entries that exist without any Service, in an order in which they can be created."""
        raise NotImplementedError(self.name)

    def entries(self, service_port: ServicePortInfo, context: Context) -> list[Entry]:
        """Return the entries that one ServicePort contributes and owns.

        Several ServicePorts may contribute one key, such as the cluster IP of a Service with two ports; if their
        values differ, the one of the first owner in the order of ServicePort names is used. Raises ConfigurationError.
        """
        raise NotImplementedError(self.name)

    def derivation(self, context: Context) -> Derivation:
        """Return the derivation of entries from all contributions together, for one set of tables."""
        return Derivation()

    def desired_tables(self, service_ports: ServicePorts, settings: DataplaneSettings) -> Tables:
        """Return the desired tables of a family by name, in the order of ``tables``.

        Raises ConfigurationError for settings that cannot be rendered.
        """
        endpoints = sum(len(item.endpoints) for item in service_ports.values())
        context = self.context(self.at_size(settings, endpoints))
        tables: Tables = {name: {} for name in (*self.tables, *self.parts)}
        _merge(tables, self.static_entries(context))
        entries = self.entries
        for name in sorted(service_ports):
            _merge(tables, entries(service_ports[name], context))
        self.derivation(context).whole(tables)
        for part in self.parts:
            del tables[part]
        return tables

    # ---- decisions: endpoints, policies and accepted traffic

    def serving(self, service_port: ServicePortInfo) -> Rendering[Any]:
        """Return the rendering that decides how a ServicePort is served, which for some is not this one."""
        return self

    def refusal(self, service_port: ServicePortInfo) -> str:
        """Return why the mode cannot serve a ServicePort at all; empty if it can."""
        return ""

    def ignored_annotation(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> Sequence[str]:
        """Return one clause for each part of the policy of a ServicePort that the mode does not support."""
        policy = service_port.policy
        found = list(policy.problems)
        if policy.userspace and not self.forwards:
            found.append(f"userspace mode needs the agent; {self.name} mode serves it")
        if policy.scheduler not in ("", self.scheduler):
            found.append(f"{self.name} mode has no scheduler {policy.scheduler}; its own ({self.scheduler}) is used")
        elif policy.scheduler_flags:
            found.append(f"{self.name} mode has no flags of schedulers")
        if policy.persistence_v4 or policy.persistence_v6:
            found.append(f"{self.name} mode has no persistence netmask; affinity distinguishes every client")
        return found

    def requested_schedulers(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> frozenset[str]:
        """Return the schedulers, other than the node's, that a ServicePort uses if the kernel has them.

        They are schedulers of IPVS, or other features by which a mode chooses endpoints.
        """
        return frozenset()

    def slot_lists(self, service_port: ServicePortInfo) -> int:
        """Return the lists of slots that a ServicePort requests; they follow from its Service alone."""
        return 0

    def endpoints(
        self, service_port: ServicePortInfo, external: bool, settings: DataplaneSettings
    ) -> Sequence[Endpoint]:
        """Return the endpoints that receive traffic to the cluster IP, or from outside to external addresses."""
        only_local = service_port.external_local if external else service_port.internal_local
        return service_port.local if only_local else service_port.cluster

    def endpoint_of(
        self, service_port: ServicePortInfo, endpoints: Sequence[Endpoint], client: Client, settings: DataplaneSettings
    ) -> Optional[Endpoint]:
        """Return the endpoint that a client reaches; None if the client's address and port do not determine it."""
        return None

    def endpoints_for(
        self, service_port: ServicePortInfo, external: bool, client: Client, settings: DataplaneSettings
    ) -> Sequence[Endpoint]:
        """Return the endpoints that one client can reach: under policy Local, the inside of the node reaches all."""
        if external and service_port.external_local and client.is_inside and service_port.cluster:
            return service_port.cluster
        return self.endpoints(service_port, external, settings)

    def shares_of(
        self, service_port: ServicePortInfo, endpoints: Sequence[Endpoint], settings: DataplaneSettings
    ) -> Shares:
        """Return the shares of endpoints in new connections; none where they depend on something else."""
        return shares(endpoints) if service_port.weighted else (1,) * len(endpoints)

    def hash_input(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> str:
        """Return which part of a client determines its endpoint, in words; empty if none does."""
        return ""

    def selection_text(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> str:
        """Return how the mode chooses one of several endpoints, in words."""
        by = self.hash_input(service_port, settings)
        return f"by the client's {by}" if by else "at random"

    def masquerade(
        self, service_port: ServicePortInfo, external: bool, client: Client, settings: DataplaneSettings
    ) -> Masquerade:
        """Return whether the source address of a client's packets is replaced."""
        if external:
            return masquerade_external(service_port.external_local, client, True)
        return masquerade_internal(settings.masquerade_all, settings.local_traffic is not None, client, False)

    def checks_sources_first(self, settings: DataplaneSettings) -> bool:
        """Return whether a source that is not allowed is dropped even if there is no endpoint."""
        return True

    def drops_without_local(self, settings: DataplaneSettings) -> bool:
        """Return whether policy Local drops connections if all endpoints are on other nodes."""
        return True

    # ---- explanation: entries of one destination

    def places(
        self, service_port: ServicePortInfo, place: Arrival, client: Client, settings: DataplaneSettings
    ) -> Sequence[Arrival]:
        """Return the destination of a flow, and others to which the mode redirects it before it reaches an endpoint."""
        return (place,)

    def rows(self, family: str, tables: Mapping[str, Mapping[Any, Any]], place: Arrival) -> list[str]:
        """Return what tables, desired or observed ones, have for a destination, in native syntax."""
        raise NotImplementedError(self.name)

    def common_keys(self, static: Sequence[Entry], tables: Mapping[str, Mapping[Any, Any]]) -> list[tuple[str, Any]]:
        """Return table and key of the entries on which all Services depend; ``static``: those that have no owner."""
        return [(table, key) for table, key, _value in static if table in tables]

    def serves(self, entry: Entry, address: str, port: int) -> bool:
        """Return whether an entry of a ServicePort affects its traffic to an address and port."""
        return True

    # ---- texts in native syntax

    def lines(self, family: str, table: str, key: Any, value: Any) -> list[str]:
        """Return an entry in the native syntax of iptables, ipset, ipvsadm, ip or nft."""
        raise NotImplementedError(self.name)

    def summary(self, family: str, table: str, key: Any, value: Any) -> list[str]:
        """Return an entry as in :meth:`lines`, or shorter if that would be hundreds of lines."""
        return self.lines(family, table, key, value)

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> dict[str, str]:
        """Return desired tables as input of the usual tools, by tool (``iptables-restore``, ``nft IPv4``, ...)."""
        raise NotImplementedError(self.name)


def _merge(tables: Tables, entries: list[Entry]) -> None:
    """Add the entries to tables; of entries with the same key the first one wins."""
    for table, key, value in entries:
        tables[table].setdefault(key, value)
