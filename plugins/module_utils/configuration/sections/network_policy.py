# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The section ``networkPolicy``: enforcement of network policies for the pods of the node."""

from __future__ import annotations

from typing import FrozenSet, NamedTuple, Tuple

from ...cluster.api.resource_types import (
    CLUSTER_NETWORK_POLICIES,
    NAMESPACES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    ResourceType,
)
from ..field import HONOURED, Field
from ..reader import Section

KEEP, CUT = "keep", "cut"
ALLOW, DENY = "allow", "deny"
_MOST_GROUP = 65535
#: 100 is what other implementations use by default.
_DEFAULT_GROUP = 4114


class NetworkPolicySettings(NamedTuple):
    """How network policies are enforced.

    ``standalone``: the node serves no Services, because kube-proxy or another program does.
    ``established_connections``: ``keep`` or ``cut`` connections that a change no longer allows. ``log_group``: NFLOG
    group of denied packets, if ``log_denied``. ``unknown_pods``: ``allow`` or ``deny`` traffic of addresses in
    ``pod_cidrs`` (canonical; if empty those of the Node) that belong to no known pod. ``egress_exempt_cidrs``
    (canonical): to these, no egress rule is applied. ``check_sources``: drop packets with a forged source.
    ``exempt_sources`` (canonical): pods of ``exempt_source_namespaces`` (if empty, of all) may send from these although
    they are not theirs.
    """

    enabled: bool = False
    standalone: bool = False
    cluster_policies: bool = False
    established_connections: str = KEEP
    log_denied: bool = False
    log_group: int = _DEFAULT_GROUP
    unknown_pods: str = ALLOW
    pod_cidrs: Tuple[str, ...] = ()
    egress_exempt_cidrs: Tuple[str, ...] = ()
    check_sources: bool = True
    exempt_sources: Tuple[str, ...] = ()
    exempt_source_namespaces: Tuple[str, ...] = ()


def policy_resources(settings: NetworkPolicySettings) -> Tuple[ResourceType, ...]:
    """Return the collections that policies depend on; none if they are not enforced."""
    if not settings.enabled:
        return ()
    found = (PODS, NAMESPACES, NETWORK_POLICIES)
    return (*found, CLUSTER_NETWORK_POLICIES) if settings.cluster_policies else found


def policy_kinds(settings: NetworkPolicySettings) -> FrozenSet[str]:
    """Return the kinds that must be completely known before policies are enforced; none if they are not."""
    found = {resource.kind for resource in policy_resources(settings)}
    if settings.enabled and settings.unknown_pods == DENY and not settings.pod_cidrs:
        found.add(NODES.kind)
    return frozenset(found)


FIELDS: Tuple[Field, ...] = (
    Field(
        "networkPolicy.enabled",
        "network_policy.enabled",
        "false",
        "all",
        HONOURED,
        "enforce NetworkPolicies for the pods of this node",
    ),
    Field(
        "networkPolicy.standalone",
        "network_policy.standalone",
        "false",
        "all",
        HONOURED,
        "do not serve Services on this node, because kube-proxy or another program does",
    ),
    Field(
        "networkPolicy.clusterNetworkPolicies",
        "network_policy.cluster_policies",
        "false",
        "all",
        HONOURED,
        "enforce ClusterNetworkPolicies (`policy.networking.k8s.io/v1alpha2`) too",
    ),
    Field(
        "networkPolicy.establishedConnections",
        "network_policy.established_connections",
        "keep",
        "all",
        HONOURED,
        "`keep` or `cut` connections that a change of policies, labels or pods no longer allows",
    ),
    Field(
        "networkPolicy.logDenied",
        "network_policy.log_denied",
        "false",
        "all",
        HONOURED,
        "send the beginning of at most 10 denied packets a second to an NFLOG group, which the agent writes to its log",
    ),
    Field(
        "networkPolicy.logGroup",
        "network_policy.log_group",
        str(_DEFAULT_GROUP),
        "all",
        HONOURED,
        "that NFLOG group",
    ),
    Field(
        "networkPolicy.unknownPods",
        "network_policy.unknown_pods",
        "allow",
        "all",
        HONOURED,
        "`allow` or `deny` traffic of addresses in the node's pod ranges that belong to no known pod",
    ),
    Field(
        "networkPolicy.podCIDRs",
        "network_policy.pod_cidrs",
        "`spec.podCIDRs` of the Node",
        "all",
        HONOURED,
        "these pod ranges",
    ),
    Field(
        "networkPolicy.egressExemptCIDRs",
        "network_policy.egress_exempt_cidrs",
        "none",
        "all",
        HONOURED,
        "let pods connect to these CIDRs, for example to a DNS cache on the node, whatever egress rules allow",
    ),
    Field(
        "networkPolicy.checkSources",
        "network_policy.check_sources",
        "true",
        "all",
        HONOURED,
        "drop packets of pods whose source is not theirs, and those from elsewhere with addresses of pods of the node",
    ),
    Field(
        "networkPolicy.exemptSources",
        "network_policy.exempt_sources",
        "none",
        "all",
        HONOURED,
        "let pods send from these CIDRs although they are not theirs, for example from the clients of a VPN",
    ),
    Field(
        "networkPolicy.exemptSourceNamespaces",
        "network_policy.exempt_source_namespaces",
        "all",
        "all",
        HONOURED,
        "only pods of these namespaces may do so",
    ),
)


def read(section: Section) -> NetworkPolicySettings:
    """Return the settings of the section; record invalid values."""
    default = NetworkPolicySettings()
    settings = NetworkPolicySettings(
        enabled=section.flag("enabled", default.enabled),
        standalone=section.flag("standalone", default.standalone),
        cluster_policies=section.flag("clusterNetworkPolicies", default.cluster_policies),
        established_connections=section.choice("establishedConnections", (KEEP, CUT)),
        log_denied=section.flag("logDenied", default.log_denied),
        log_group=section.integer("logGroup", default.log_group, 0, _MOST_GROUP),
        unknown_pods=section.choice("unknownPods", (ALLOW, DENY)),
        pod_cidrs=section.networks("podCIDRs"),
        egress_exempt_cidrs=section.networks("egressExemptCIDRs"),
        check_sources=section.flag("checkSources", default.check_sources),
        exempt_sources=section.networks("exemptSources"),
        exempt_source_namespaces=section.namespaces("exemptSourceNamespaces"),
    )
    section.finish()
    if settings.standalone and not settings.enabled:
        section.findings.problem(section.field("standalone"), "needs networkPolicy.enabled: true")
    return settings
