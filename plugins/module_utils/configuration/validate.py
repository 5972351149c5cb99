# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Validation of the values of a configuration, and warnings; the types of its fields are checked when it is read."""

from __future__ import annotations

import re
from typing import Any, Callable, Mapping, Sequence

from ..base.addresses import canonical_network, family_of
from ..base.mode_names import AUTO, IPTABLES, IPVS, MODES, MODES_IN_EFFECT, NFTABLES
from ..cluster.fields import shown
from .feature_gates import DEFAULTS, EFFECTS, REASONS
from .field import NOTHING, given_value, problems, value_of
from .fields import FIELDS, NODE_FIELDS
from .gate_table import REMOVED
from .model import BRIDGE_INTERFACE, CLUSTER_CIDR, INTERFACE_NAME_PREFIX, PRIMARY, KubeProxyConfiguration
from .node_proxy import NodeProxyConfiguration
from .reader import Findings, raise_all

Problem = Callable[[str, str], None]

#: The section with the periods of a mode; other modes have those of iptables.
_SECTIONS = {IPTABLES: IPTABLES, IPVS: IPVS, NFTABLES: NFTABLES}

# The names of interfaces become part of rules and kernel messages. IFNAMSIZ is 16, including the final zero byte; the
# wildcard after an interface prefix takes one more character.
_INTERFACE = re.compile(r"[A-Za-z0-9_.@-]{1,15}")
_INTERFACE_PREFIX = re.compile(r"[A-Za-z0-9_.@-]{1,14}")


def validate(configuration: KubeProxyConfiguration, findings: Findings) -> None:
    """Record every problem of ``configuration`` in ``findings``, field by field."""
    _validate(configuration, (*MODES, AUTO), findings.problem)


def validate_node_proxy(configuration: NodeProxyConfiguration, findings: Findings) -> None:
    """Record every problem of ``configuration`` in ``findings``, field by field."""
    for name, reason in problems(NODE_FIELDS, configuration):
        findings.problem(name, reason)
    settings = configuration.network_policy
    if settings.standalone and not settings.enabled:
        findings.problem("networkPolicy.standalone", "needs networkPolicy.enabled: true")


def _validate(configuration: KubeProxyConfiguration, modes: Sequence[str], problem: Problem) -> None:
    if configuration.mode not in modes:
        problem("mode", f"{shown(configuration.mode)} is not one of {', '.join(modes)}")
    for name, reason in problems(FIELDS, configuration):
        if _is_validated(name, configuration.mode):
            problem(name, reason)
    section = _own_section(configuration.mode)
    if 0 < configuration.sync_period < configuration.min_sync_period:
        problem(f"{section}.minSyncPeriod", f"must not be greater than {section}.syncPeriod")
    if _is_validated("ipvs.excludeCIDRs", configuration.mode):
        _cidrs("ipvs.excludeCIDRs", configuration.ipvs.exclude_cidrs, problem)
    _local_detection(configuration, problem)
    _node_port_addresses(configuration.node_port_addresses, problem)


def _own_section(mode: str) -> str:
    """Return the section with the periods of a mode."""
    return _SECTIONS.get(mode, IPTABLES)


def _is_validated(name: str, mode: str) -> bool:
    """Return whether a field is validated: of the sections of modes only the mode's own one, as by kube-proxy 1.36."""
    section = name.partition(".")[0]
    return section not in _SECTIONS or section == _own_section(mode)


def in_mode(configuration: KubeProxyConfiguration, mode: str) -> KubeProxyConfiguration:
    """Return the same configuration in another mode of MODES_IN_EFFECT.

    Fields that only matter in that mode are validated here. Raises ConfigurationError.
    """
    if mode == configuration.mode:
        return configuration
    changed = configuration._replace(mode=mode)
    findings = Findings()
    _validate(changed, MODES_IN_EFFECT, findings.problem)
    raise_all(findings)
    return changed


def _cidrs(field: str, values: Sequence[str], problem: Problem) -> None:
    for index, value in enumerate(values):
        if canonical_network(value) is None:
            problem(f"{field}[{index}]", f"{shown(value)} is not a CIDR")


def _local_detection(configuration: KubeProxyConfiguration, problem: Problem) -> None:
    mode = configuration.detect_local_mode
    if mode == BRIDGE_INTERFACE:
        _interface("bridgeInterface", configuration.detect_local.bridge_interface, _INTERFACE, problem)
    if mode == INTERFACE_NAME_PREFIX:
        _interface("interfaceNamePrefix", configuration.detect_local.interface_name_prefix, _INTERFACE_PREFIX, problem)
    if mode == CLUSTER_CIDR:
        cidrs = configuration.cluster_cidrs
        _cidrs("clusterCIDR", cidrs, problem)
        if len(cidrs) > 2 or (len(cidrs) == 2 and family_of(cidrs[0]) == family_of(cidrs[1])):
            problem("clusterCIDR", "must be one CIDR, or one of each IP family")


def _interface(name: str, value: str, allowed: re.Pattern[str], problem: Problem) -> None:
    if not value:
        problem(f"detectLocal.{name}", "must not be empty in this detectLocalMode")
    elif allowed.fullmatch(value) is None:
        problem(f"detectLocal.{name}", f"{shown(value)} is not valid in the name of a network interface")


def _node_port_addresses(values: tuple[str, ...], problem: Problem) -> None:
    for index, value in enumerate(values):
        if value != PRIMARY and canonical_network(value) is None:
            problem(f"nodePortAddresses[{index}]", f"{shown(value)} is not a CIDR, primary, localhost or all")


def without_effect(configuration: KubeProxyConfiguration, source: Mapping[str, Any]) -> list[str]:
    """Return a warning for each field and feature gate that has no effect and is not set to its default.

    ``source``: the fields as they were read, for those that the model does not have.
    """
    found = []
    default = KubeProxyConfiguration()
    for field in FIELDS:
        if field.effect != NOTHING:
            continue
        if field.attribute:
            value = value_of(configuration, field.attribute)
            given = value != value_of(default, field.attribute) and value not in field.harmless
        else:
            given = not _is_zero(given_value(source, field.name))
        if given:
            found.append(f"{field.name}: has no effect here: {field.text}")
    for name, on in configuration.feature_gates:
        if name not in EFFECTS and on != DEFAULTS[name]:
            reason = f": {REASONS[name]}" if name in REASONS else ""
            found.append(f"featureGates.{name}: has no effect here{reason}")
    gates = source.get("featureGates")
    for name in gates if isinstance(gates, Mapping) else ():
        if name in REMOVED:
            found.append(f"featureGates.{name}: has no effect: it is no longer a feature gate of kube-proxy")
    return found


def _is_zero(value: Any) -> bool:
    """Return whether a value is Go's zero value (at any depth), which kubeadm writes for an unset field."""
    if isinstance(value, Mapping):
        return all(map(_is_zero, value.values()))
    return not value or value == "0"
