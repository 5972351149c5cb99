# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The feature gates of kube-proxy 1.36, those removed before it, and those of later versions."""

from __future__ import annotations

from typing import Dict, Mapping, NamedTuple, Tuple

ALLOW_SERVICE_EXTERNAL_IPS = "AllowServiceExternalIPs"
NATIVE_HISTOGRAMS = "NativeHistograms"
COMPONENT_FLAGZ = "ComponentFlagz"
COMPONENT_STATUSZ = "ComponentStatusz"
LOCALHOST_NODE_PORTS = "KubeProxyNFTablesLocalhostNodePorts"

ALPHA, BETA, GENERAL = "ALPHA", "BETA", ""


class Gate(NamedTuple):
    """A feature gate of kube-proxy 1.36.

    ``stage``: ALPHA, BETA or GENERAL, as metrics name it. ``locked``: cannot be changed. ``effect``: a description of
    its effect in this project; empty for none.
    """

    default: bool
    stage: str = GENERAL
    locked: bool = False
    effect: str = ""


GATES: Mapping[str, Gate] = {
    ALLOW_SERVICE_EXTERNAL_IPS: Gate(True, effect="off: `spec.externalIPs` are not served"),
    COMPONENT_FLAGZ: Gate(True, BETA, effect="off: no page `/flagz`"),
    COMPONENT_STATUSZ: Gate(True, BETA, effect="off: no page `/statusz`"),
    "ContextualLogging": Gate(True, BETA),
    LOCALHOST_NODE_PORTS: Gate(
        True, BETA, effect="off: in nftables mode node ports on loopback addresses are neither served nor rejected"
    ),
    "LoggingAlphaOptions": Gate(False, ALPHA),
    "LoggingBetaOptions": Gate(True, BETA),
    "MultiCIDRServiceAllocator": Gate(True, locked=True),
    "NFTablesProxyMode": Gate(True, locked=True),
    NATIVE_HISTOGRAMS: Gate(False, ALPHA),
    "PreferSameTrafficDistribution": Gate(True, locked=True),
}
"""By name."""

DEFAULTS: Mapping[str, bool] = {name: gate.default for name, gate in GATES.items()}
"""Default value by name."""

LATER_GATES: Mapping[str, str] = {
    "KubeProxyIPVS": "ipvs mode is always available",
    "NFTablesNetlink": "nftables mode always uses netlink",
}
"""Gates that kube-proxy has since 1.37, and why they have no effect here."""

REMOVED_GATES: Tuple[str, ...] = (
    "EndpointSliceProxying",
    "KubeProxyDrainingTerminatingNodes",
    "LoadBalancerIPMode",
    "ProxyTerminatingEndpoints",
    "ServiceInternalTrafficPolicy",
    "ServiceTrafficDistribution",
    "TopologyAwareHints",
)
"""Gates that kube-proxy 1.36 no longer has."""

_GROUPS: Mapping[str, Tuple[str, ...]] = {
    "AllAlpha": ("LoggingAlphaOptions", NATIVE_HISTOGRAMS),
    "AllBeta": (COMPONENT_FLAGZ, COMPONENT_STATUSZ, LOCALHOST_NODE_PORTS, "LoggingBetaOptions"),
}


def is_known(name: str) -> bool:
    """Return whether kube-proxy 1.36 has a feature gate, or a group of feature gates, of that name."""
    return name in GATES or name in _GROUPS


def locked_problem(name: str, value: bool) -> str:
    """Return why a feature gate cannot be set to ``value``, or empty text."""
    gate = GATES.get(name)
    if gate is not None and gate.locked and value != gate.default:
        return f"is locked to {str(gate.default).lower()}"
    return ""


def expanded(gates: Mapping[str, bool]) -> Dict[str, bool]:
    """Return ``gates`` with AllAlpha and AllBeta expanded; an explicit gate takes precedence over its group."""
    spelled: Dict[str, bool] = {}
    for group, members in _GROUPS.items():
        if group in gates:
            spelled.update(dict.fromkeys(members, gates[group]))
    spelled.update({name: value for name, value in gates.items() if name not in _GROUPS})
    return spelled
