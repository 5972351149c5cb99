# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks of a configuration against the node's IP families, as kube-proxy 1.36 makes them when it starts."""

from __future__ import annotations

from typing import Sequence

from ..base.addresses import UNSPECIFIED, family_of
from ..base.errors import ConfigurationError
from .model import CLUSTER_CIDR, NODE_CIDR, PRIMARY, KubeProxyConfiguration
from .values import split_host_port


def check_consistency(
    configuration: KubeProxyConfiguration,
    primary_family: str,
    supported_families: Sequence[str],
    pod_cidrs: Sequence[str] = (),
    *,
    has_node_ports: bool = True,
) -> tuple[str, ...]:
    """Return warnings about options that do not fit the node's IP families, one line each.

    ``supported_families``: those that the node can serve; ``pod_cidrs``: spec.podCIDRs of the Node (canonical).
    ``has_node_ports``: whether any Service has a node port. Raises ConfigurationError where kube-proxy would not start:
    the node does not support the primary family, or the pod CIDRs for detectLocalMode are all of the other family (for
    ClusterCIDR only if the node is single-stack). The source of these rules is checkBadIPConfig of kube-proxy.
    """
    if primary_family not in supported_families:
        raise ConfigurationError(f"bindAddress: the primary IP family {primary_family} is not supported by this node")
    dual_stack = len(set(supported_families)) == 2
    warnings = _pod_range_warnings(configuration, primary_family, dual_stack, pod_cidrs)
    warnings += _node_port_warnings(configuration, primary_family, has_node_ports)
    if not dual_stack:
        warnings += _other_family_warnings(configuration, primary_family)
    return tuple(warnings)


def _has(values: Sequence[str], family: str) -> bool:
    return any(family_of(value) == family for value in values)


def _pod_range_warnings(
    configuration: KubeProxyConfiguration, primary_family: str, dual_stack: bool, pod_cidrs: Sequence[str]
) -> list[str]:
    warnings: list[str] = []
    for name, values, mode in (
        ("clusterCIDR", configuration.cluster_cidrs, CLUSTER_CIDR),
        ("spec.podCIDRs of the Node", pod_cidrs, NODE_CIDR),
    ):
        if not values and mode == configuration.detect_local_mode == NODE_CIDR:
            warnings.append(f"{name}: is empty, so detectLocalMode {mode} recognises no pods of this node")
        if not values or _has(values, primary_family):
            continue
        text = f"{name}: {', '.join(values)} has no CIDR of the primary IP family {primary_family}"
        if configuration.detect_local_mode == mode and (mode == NODE_CIDR or not dual_stack):
            raise ConfigurationError(text)
        warnings.append(text)
    return warnings


def _node_port_warnings(configuration: KubeProxyConfiguration, primary_family: str, has_node_ports: bool) -> list[str]:
    values = configuration.effective_node_port_addresses
    if not values and not has_node_ports:
        return []
    if not values:
        return ["nodePortAddresses: is not set, so node ports answer on all addresses of the node; consider primary"]
    if PRIMARY in values:
        return []
    warnings: list[str] = []
    if not _has(values, primary_family):
        warnings.append(f"nodePortAddresses: has no CIDR of the primary IP family {primary_family}")
    if len({family_of(value) for value in values}) == 1 and _is_dual_stack(configuration):
        warnings.append("nodePortAddresses: is of one IP family while other options are dual-stack")
    return warnings


def _is_dual_stack(configuration: KubeProxyConfiguration) -> bool:
    lists = [configuration.cluster_cidrs, configuration.effective_exclude_cidrs]
    return any(len({family_of(value) for value in values}) == 2 for values in lists)


def _other_family_warnings(configuration: KubeProxyConfiguration, primary_family: str) -> list[str]:
    warnings: list[str] = []
    text = f"is not of this node's only IP family {primary_family}"
    excluded = configuration.effective_exclude_cidrs
    if excluded and not _has(excluded, primary_family):
        warnings.append(f"ipvs.excludeCIDRs: {', '.join(excluded)} {text}")
    for name, value in (
        ("healthzBindAddress", configuration.healthz_bind_address),
        ("metricsBindAddress", configuration.metrics_bind_address),
    ):
        address = split_host_port(value)[0]
        # The unspecified address of either family means all addresses of the node.
        if address not in UNSPECIFIED.values() and family_of(address) != primary_family:
            warnings.append(f"{name}: {value} {text}")
    return warnings
