# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The request to a convergence, and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, NamedTuple, Optional, Tuple

from ..cluster.model import NamespacedName
from ..cluster.state import ClusterState
from ..configuration.model import KubeProxyConfiguration
from ..errors import Refusal
from .defaults import DEFAULT_KEEP, DEFAULT_LOCK_SECONDS, DEFAULT_LOSS_PERCENT
from .runtime.state_directory import DEFAULT_DIRECTORY

if TYPE_CHECKING:
    from .probing.traffic import Target


class Request(NamedTuple):
    """One convergence of this node.

    ``cluster``: the Services, EndpointSlices, Nodes and ServiceCIDRs. ``node_name``: empty for the rule of the
    configuration (hostnameOverride, else the host's name). ``mode``: empty for the configuration's. ``state``: present,
    absent, or released (kube-proxy has replaced us on the node). ``fallback``: ``iptables`` to use that mode, with a
    warning, if ipvs is not possible. ``check``: change nothing at all. ``describe``: include the lines of every changed
    table. ``state_directory``: contains the lock and the ledger; it should not survive a reboot. ``lock_timeout``:
    seconds to wait for another convergence. ``ignore_findings``: names of preflight findings to ignore.
    ``node_addresses``: addresses to assume for the node when rendering, which inspects no node.

    ``history_directory``: where to save the node's state before a change; empty to save nothing. ``keep_states``:
    number of saved states to keep. ``confirm_timeout``: seconds within which the change must be confirmed, otherwise
    the node rolls back automatically; 0 for a change that needs no confirmation (see ``history``).

    ``whole_cluster``: the cluster state is that of a complete cluster to which the node belongs; an incomplete one, or
    one without the node's Node, is refused. ``outside_host``: the node is a host outside the cluster, without a Node.
    ``max_loss_percent``: refuse a change that leaves more than this percentage of the Services that are currently
    served without endpoints (100: never). ``unattended``: no person watches the run, so it refuses such a change once,
    and applies it if the next complete cluster state is the same. ``agent``: the caller is the agent, which can forward
    connections itself. ``traffic``: Services whose probes the report should contain.
    """

    cluster: ClusterState
    configuration: KubeProxyConfiguration
    node_name: str = ""
    mode: str = ""
    state: str = "present"
    fallback: str = ""
    check: bool = False
    describe: bool = False
    state_directory: str = DEFAULT_DIRECTORY
    lock_timeout: float = DEFAULT_LOCK_SECONDS
    ignore_findings: Tuple[str, ...] = ()
    node_addresses: Tuple[str, ...] = ()
    history_directory: str = ""
    keep_states: int = DEFAULT_KEEP
    confirm_timeout: float = 0.0
    whole_cluster: bool = True
    outside_host: bool = False
    max_loss_percent: float = DEFAULT_LOSS_PERCENT
    unattended: bool = False
    agent: bool = False
    traffic: Tuple[NamespacedName, ...] = ()

    @property
    def needs_no_node(self) -> bool:
        """Whether the host is outside the cluster, by this request or by its configuration."""
        return self.outside_host or self.configuration.node_proxy.outside_host.enabled


class TableChange(NamedTuple):
    """How one resource table differs from the desired one: counts of keys, and lines before and after if requested.

    ``entries``: names of the first few entries, those with the most missing first.
    """

    table: str
    added: int
    replaced: int
    removed: int
    before: Tuple[str, ...] = ()
    after: Tuple[str, ...] = ()
    entries: Tuple[str, ...] = ()


class Report(NamedTuple):
    """The result of a convergence.

    ``changed``: something differed (and was changed, unless checking). ``changes`` contains only tables that differ.
    ``counts``: services, without_endpoints (of these), service_ports, endpoints, added, replaced, removed.
    ``programmed``: entries per table after the convergence (in a check: the current ones). ``durations``: seconds per
    stage and per table. ``mode_reason``: why ``mode`` was chosen. ``xtables_variant``: the iptables in use.
    ``behaviour``: kube-proxy or corrected. ``ipvs_glue``: iptables or nftables in ipvs mode, else empty.
    ``unselected_pods``: pods of this node that no NetworkPolicy selects; ``unused_policies``: NetworkPolicies that
    select no pod; both empty where policies are not enforced. ``skipped``: invalid parts of objects. ``saved_state``:
    the number of the state saved before the change, None if none was saved. ``confirm_until``: when the node rolls back
    to it unless the change is confirmed (UTC, RFC 3339), empty if it needs no confirmation. ``probes``: probes of the
    API server and DNS, to run before confirming. ``targets``: the probes of the Services that the request names.
    """

    mode: str
    mode_reason: str
    node_name: str
    families: Tuple[str, ...]
    xtables_variant: str
    changed: bool
    changes: Tuple[TableChange, ...]
    counts: Dict[str, int]
    programmed: Dict[str, int]
    refused: Tuple[Refusal, ...]
    warnings: Tuple[str, ...]
    durations: Dict[str, float]
    conntrack_deleted: int = 0
    saved_state: Optional[int] = None
    confirm_until: str = ""
    probes: Tuple[str, ...] = ()
    skipped: Tuple[Refusal, ...] = ()
    behaviour: str = ""
    ipvs_glue: str = ""
    unselected_pods: Tuple[str, ...] = ()
    unused_policies: Tuple[str, ...] = ()
    targets: Tuple[Target, ...] = ()
