# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The NodeProxyConfiguration (kubenode.proxy/v1alpha1): settings that kube-proxy does not have.

It is the second document of the configuration file, so that the first one remains a KubeProxyConfiguration that
kube-proxy loads. Each section has a separate module in ``sections``, with its model, a function that reads and
validates it, and one row for each field. To add a section, add it in three places here: an attribute of the model, a
line in :func:`read_node_proxy`, and its rows in ``FIELDS``.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Tuple

from ..cluster.fields import shown
from .field import Field
from .reader import Findings, Section
from .sections import (
    api_servers,
    behaviour,
    health_checks,
    ipvs_filter_backend,
    network_policy,
    outside_host,
    service_policy,
    static_services,
    traffic,
    userspace,
)
from .sections.api_servers import ApiServerSettings
from .sections.behaviour import BehaviourSettings
from .sections.health_checks import HealthChecks
from .sections.network_policy import NetworkPolicySettings
from .sections.outside_host import OutsideHost
from .sections.service_policy import ServicePolicySettings
from .sections.static_services import StaticServices
from .sections.traffic import TrafficSettings
from .sections.userspace import UserspaceSection

API_VERSION = "kubenode.proxy/v1alpha1"
KIND = "NodeProxyConfiguration"


class NodeProxyConfiguration(NamedTuple):
    """All sections. ``NodeProxyConfiguration()`` is what a file without this document configures."""

    behaviour: BehaviourSettings = BehaviourSettings()
    service_policy: ServicePolicySettings = ServicePolicySettings()
    static_services: StaticServices = StaticServices()
    health_checks: HealthChecks = HealthChecks()
    api_servers: ApiServerSettings = ApiServerSettings()
    outside_host: OutsideHost = OutsideHost()
    userspace: UserspaceSection = UserspaceSection()
    network_policy: NetworkPolicySettings = NetworkPolicySettings()
    ipvs_filter_backend: str = ipvs_filter_backend.AUTO
    traffic: TrafficSettings = TrafficSettings()


FIELDS: Tuple[Field, ...] = (
    *behaviour.FIELDS,
    *service_policy.FIELDS,
    *static_services.FIELDS,
    *health_checks.FIELDS,
    *api_servers.FIELDS,
    *outside_host.FIELDS,
    *ipvs_filter_backend.FIELDS,
    *userspace.FIELDS,
    *network_policy.FIELDS,
    *traffic.FIELDS,
)


def read_node_proxy(values: Mapping[str, Any], findings: Findings) -> NodeProxyConfiguration:
    """Return the configuration of the fields ``values``; record invalid and unknown fields in ``findings``."""
    root = Section({"apiVersion": API_VERSION, "kind": KIND, **values}, "", findings)
    for name, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        value = root.text(name)
        if value != expected:
            findings.problem(name, f"{shown(value)} is not {expected}")
    configuration = NodeProxyConfiguration(
        behaviour=behaviour.read(root),
        service_policy=service_policy.read(root.section("servicePolicy")),
        static_services=static_services.read(root.section("staticServices")),
        userspace=userspace.read(root.section("userspace")),
        network_policy=network_policy.read(root.section("networkPolicy")),
        health_checks=health_checks.read(root.section("healthChecks")),
        api_servers=api_servers.read(root.section("apiServers")),
        outside_host=outside_host.read(root.section("outsideHost")),
        ipvs_filter_backend=ipvs_filter_backend.read(root),
        traffic=traffic.read(root.section("traffic")),
    )
    root.finish()
    return configuration
