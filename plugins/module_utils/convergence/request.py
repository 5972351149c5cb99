# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a convergence is asked to do, and what it reports."""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Tuple

from ..cluster.state import ClusterState
from ..configuration.model import KubeProxyConfiguration
from ..errors import Refusal


class Request(NamedTuple):
    """One convergence of this node.

    ``cluster``: the Services, EndpointSlices, Nodes and ServiceCIDRs. ``node_name``: empty for the rule of the
    configuration (hostnameOverride, else the host's name). ``mode``: empty for the configuration's. ``state``: present,
    absent, or released (kube-proxy has taken the node over). ``fallback``: ``iptables`` to use that where ipvs is not
    possible, with a warning. ``check``: change nothing at all. ``describe``: fill in the lines of every changed table.
    ``state_directory``: where the lock and the memory of what was last programmed live; it should not outlive a
    reboot. ``lock_timeout``: seconds to wait for another convergence. ``ignore_findings``: names of preflight findings
    to go on in spite of. ``node_addresses``: those the node is taken to have where none is looked at (rendering).

    ``history_directory``: where the node's state is saved before it is changed; empty to save nothing.
    ``keep_states``: how many saved states are kept. ``confirm_timeout``: seconds within which the change has to be
    confirmed, else the node goes back to the saved state by itself; 0 for a change that stays (see ``history``).

    ``whole_cluster``: the cluster state is that of a whole cluster to which the node belongs; one that is incomplete or
    without the node's Node is refused. ``outside_host``: the node is a host outside the cluster, without a Node.
    ``max_loss_percent``: a change that leaves more of the Services served now without endpoints is refused (100: none
    is). ``unattended``: nobody watches the run, so it refuses such a change once, and makes it if the next complete
    cluster state says the same.
    """

    cluster: ClusterState
    configuration: KubeProxyConfiguration
    node_name: str = ""
    mode: str = ""
    state: str = "present"
    fallback: str = ""
    check: bool = False
    describe: bool = False
    state_directory: str = "/run/kubenode-proxy"
    lock_timeout: float = 30.0
    ignore_findings: Tuple[str, ...] = ()
    node_addresses: Tuple[str, ...] = ()
    history_directory: str = ""
    keep_states: int = 5
    confirm_timeout: float = 0.0
    whole_cluster: bool = True
    outside_host: bool = False
    max_loss_percent: float = 50.0
    unattended: bool = False


class TableChange(NamedTuple):
    """How one resource table differs from what is desired: counts of keys, and lines before and after if asked for.

    ``entries``: names of the first few, those first that lack most.
    """

    table: str
    added: int
    replaced: int
    removed: int
    before: Tuple[str, ...] = ()
    after: Tuple[str, ...] = ()
    entries: Tuple[str, ...] = ()


class Report(NamedTuple):
    """What a convergence found and did.

    ``changed``: something differed (and was changed, unless checking). ``changes`` holds only tables that differ.
    ``counts``: services, without_endpoints (of these), service_ports, endpoints, added, replaced, removed.
    ``programmed``: entries per table as they are afterwards (in a check: as they are).
    ``durations``: seconds per stage and per table. ``mode_reason`` and ``xtables_variant`` say what was chosen and why.
    ``skipped``: parts of objects that are left out. ``saved_state``: the number of the state saved before the change,
    None if none was. ``confirm_until``: when the node
    goes back to it unless the change is confirmed (UTC, RFC 3339), empty if it stays. ``probes``: how to see whether
    the API server and DNS are served, for whoever confirms.
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
