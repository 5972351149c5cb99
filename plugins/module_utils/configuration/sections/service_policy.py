# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``servicePolicy``: whose annotations apply, sources of node ports, and external addresses of Services."""

from __future__ import annotations

from typing import NamedTuple, Tuple

from ...cluster.fields import is_dns_label, shown
from ..field import HONOURED, Field
from ..reader import Section


class ServicePolicySettings(NamedTuple):
    """Settings of the policies of Services.

    ``annotations_enabled``: whether annotations of Services apply. ``annotated_namespaces``: only those in these
    namespaces do; all if it is empty. ``aliases``: equivalent annotations of kube-router and Cilium apply, too.
    ``node_weights``: annotations of Nodes apply. ``node_port_sources``: CIDRs whose sources may use node ports, empty
    for all. ``local_services``: Services that programs on the node serve, as ``namespace/name``. ``external_ranges``:
    CIDRs of the external IPs and load balancer addresses that Services of the cluster may have, empty for any.
    """

    annotations_enabled: bool = True
    annotated_namespaces: Tuple[str, ...] = ()
    node_port_sources: Tuple[str, ...] = ()
    aliases: bool = False
    node_weights: bool = False
    local_services: Tuple[str, ...] = ()
    external_ranges: Tuple[str, ...] = ()


FIELDS: Tuple[Field, ...] = (
    Field(
        "servicePolicy.annotations",
        "service_policy.annotations_enabled",
        "`true`",
        "all",
        HONOURED,
        "whether the annotations of [Service policy](service-policy.md) apply",
    ),
    Field(
        "servicePolicy.namespaces",
        "service_policy.annotated_namespaces",
        "all",
        "all",
        HONOURED,
        "only annotations in these namespaces apply",
    ),
    Field(
        "servicePolicy.aliases",
        "service_policy.aliases",
        "`false`",
        "all",
        HONOURED,
        "equivalent annotations of kube-router and Cilium apply, too",
    ),
    Field(
        "servicePolicy.nodeWeights",
        "service_policy.node_weights",
        "`false`",
        "all",
        HONOURED,
        "the annotation `kubenode.proxy/weight` of Nodes applies; the agent then watches all Nodes",
    ),
    Field(
        "servicePolicy.nodePortSources",
        "service_policy.node_port_sources",
        "all",
        "all",
        HONOURED,
        "CIDRs whose sources may use the node ports of this node; if all are of one family, node ports of the other"
        " family are closed",
    ),
    Field(
        "servicePolicy.localServices",
        "service_policy.local_services",
        "none",
        "all",
        HONOURED,
        "Services, as `namespace/name`, that are left to [programs on the node](service-policy.md#node-local-programs)",
    ),
    Field(
        "servicePolicy.externalRanges",
        "service_policy.external_ranges",
        "all",
        "all",
        HONOURED,
        "CIDRs to which external IPs and load balancer addresses of Services of the cluster are"
        " [limited](security.md#external-addresses); if all are of one family, those of the other are refused",
    ),
)


def read(section: Section) -> ServicePolicySettings:
    """Read and validate the section."""
    annotations = section.flag("annotations", True)
    namespaces = section.namespaces("namespaces")
    aliases = section.flag("aliases", False)
    node_weights = section.flag("nodeWeights", False)
    sources = section.networks("nodePortSources")
    external_ranges = section.networks("externalRanges")
    local_services = section.strings("localServices")
    for index, text in enumerate(local_services):
        if len(text.split("/")) != 2 or not all(map(is_dns_label, text.split("/"))):
            where = f"{section.field('localServices')}[{index}]"
            section.findings.problem(where, f"{shown(text)} is not a Service, NAMESPACE/NAME")
    section.finish()
    return ServicePolicySettings(
        annotations_enabled=annotations,
        annotated_namespaces=namespaces,
        node_port_sources=sources,
        aliases=aliases,
        node_weights=node_weights,
        local_services=local_services,
        external_ranges=external_ranges,
    )
