# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The request to a convergence, and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterable, NamedTuple, Optional

from ..base.errors import Refusal
from ..base.installed import STATE_DIRECTORY
from ..cluster.model import NamespacedName
from ..cluster.state import ClusterState
from ..configuration.model import KubeProxyConfiguration
from .defaults import DEFAULT_KEEP, DEFAULT_LOCK_SECONDS, DEFAULT_UNSERVED_PERCENT

if TYPE_CHECKING:
    from ..kernel.xtables.variant import XtablesVariant
    from .probing.traffic import Target


Interfaces = tuple[tuple[str, str], ...]
"""The name and an address of an interface each."""


class Request(NamedTuple):
    """One convergence of this node. Call :meth:`confine` before anything depends on the Services."""

    #: The Services, EndpointSlices, Nodes and ServiceCIDRs.
    cluster: ClusterState
    configuration: KubeProxyConfiguration
    #: Empty for the configuration's rule (hostnameOverride, otherwise the host's name).
    node_name: str = ""
    #: Empty for the configuration's.
    mode: str = ""
    #: ``present``, ``absent``, or ``handed_over`` (kube-proxy has replaced us on the node).
    state: str = "present"
    #: ``iptables`` to use that mode, with a warning, if ipvs is not possible; or empty.
    fallback: str = ""
    #: Change nothing at all.
    check: bool = False
    #: Only compare: another program that conflicts with a convergence causes a warning.
    compare: bool = False
    #: Include the lines of every changed table.
    describe: bool = False
    #: The directory of the lock and the ledger, which should not survive a reboot.
    state_directory: str = STATE_DIRECTORY
    #: Seconds to wait for another convergence.
    lock_timeout: float = DEFAULT_LOCK_SECONDS
    #: Names of preflight findings to ignore.
    ignore_findings: tuple[str, ...] = ()
    #: Addresses to assume for the node when rendering, which inspects no node.
    node_addresses: tuple[str, ...] = ()
    #: Name and address of each interface, where they may not be configured yet; empty for those that they have.
    interfaces: Interfaces = ()
    #: Where to save the node's state before a change; empty to save nothing.
    history_directory: str = ""
    #: Number of saved states to keep.
    keep_states: int = DEFAULT_KEEP
    #: Seconds within which the change must be confirmed, otherwise the node rolls back automatically; 0 for a change
    #: that needs no confirmation (see ``history``).
    confirm_timeout: float = 0.0
    #: The cluster state is complete, and the node belongs to the cluster; an incomplete state, or one without the
    #: node's Node, is refused.
    whole_cluster: bool = True
    #: The node is a host outside the cluster, without a Node.
    outside_host: bool = False
    #: Refuse a change that leaves more than this percentage of the currently served Services without endpoints (100:
    #: never).
    max_unserved_percent: float = DEFAULT_UNSERVED_PERCENT
    #: Nobody watches the run, so such a change is refused once, and applied if the next complete cluster state is the
    #: same.
    unattended: bool = False
    #: The caller is the agent, which can forward connections itself.
    agent: bool = False
    #: Services whose probes the report should contain.
    traffic: tuple[NamespacedName, ...] = ()
    #: Returns the raw objects of the cluster, for what keeps them.
    objects: Callable[[], Iterable[Any]] = tuple

    @property
    def needs_no_node(self) -> bool:
        """Whether the host is outside the cluster, by this request or by its configuration."""
        return self.outside_host or self.configuration.node_proxy.outside_host.enabled

    def confine(self) -> None:
        """Limit external addresses of the cluster's Services as configured."""
        self.cluster.set_external_ranges(self.configuration.node_proxy.service_policy.external_ranges)


class TableChange(NamedTuple):
    """How one resource table differs from the desired one: counts of keys, and lines before and after if requested.

    ``entries``: names of the first few entries, those with the most missing first. ``of_cluster``: the desired table
    depends on the cluster state.
    """

    table: str
    added: int
    replaced: int
    removed: int
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    of_cluster: bool = False


class Report(NamedTuple):
    """The result of a convergence."""

    mode: str
    #: Why ``mode`` was chosen.
    mode_reason: str
    node_name: str
    families: tuple[str, ...]
    #: The iptables in use.
    xtables_variant: Optional[XtablesVariant]
    #: Something differed (and was changed, unless checking).
    changed: bool
    #: The tables that differ.
    changes: tuple[TableChange, ...]
    #: ``services``, ``without_endpoints`` (of these), ``service_ports``, ``endpoints``, ``added``, ``replaced``,
    #: ``removed``.
    counts: dict[str, int]
    #: Entries per table after the convergence (in a check: the current ones).
    programmed: dict[str, int]
    refused: tuple[Refusal, ...]
    warnings: tuple[str, ...]
    #: Seconds per stage and per table.
    durations: dict[str, float]
    conntrack_deleted: int = 0
    #: The number of the state saved before the change, None if none was saved.
    saved_state: Optional[int] = None
    #: When the node rolls back to the saved state unless the change is confirmed (UTC, RFC 3339); empty if it needs no
    #: confirmation.
    confirm_until: str = ""
    #: Probes of the API server and DNS, to run before confirming.
    probes: tuple[str, ...] = ()
    #: Invalid parts of objects.
    skipped: tuple[Refusal, ...] = ()
    #: ``kube-proxy`` or ``corrected``.
    behaviour: str = ""
    #: ``iptables`` or ``nftables`` in ipvs mode, otherwise empty.
    ipvs_filter_backend: str = ""
    #: Pods of this node that no NetworkPolicy selects; empty where policies are not enforced.
    unselected_pods: tuple[str, ...] = ()
    #: NetworkPolicies that select no pod; empty where policies are not enforced.
    unused_policies: tuple[str, ...] = ()
    #: The probes of the Services that the request names.
    targets: tuple[Target, ...] = ()
