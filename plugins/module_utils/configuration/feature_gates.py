# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The feature gates of kube-proxy 1.36 that have to do with what this project does."""

from __future__ import annotations

from typing import Dict, FrozenSet, Mapping, Tuple

ALLOW_SERVICE_EXTERNAL_IPS = "AllowServiceExternalIPs"
NATIVE_HISTOGRAMS = "NativeHistograms"

DEFAULTS: Mapping[str, bool] = {
    ALLOW_SERVICE_EXTERNAL_IPS: True,
    "ComponentFlagz": True,
    "ComponentStatusz": True,
    "ContextualLogging": True,
    "LoggingAlphaOptions": False,
    "LoggingBetaOptions": True,
    "MultiCIDRServiceAllocator": True,
    "NFTablesProxyMode": True,
    NATIVE_HISTOGRAMS: False,
    "PreferSameTrafficDistribution": True,
}
"""Default value by name."""

LOCKED: FrozenSet[str] = frozenset(("MultiCIDRServiceAllocator", "NFTablesProxyMode", "PreferSameTrafficDistribution"))
"""Gates whose value cannot be changed any more."""

_GROUPS: Mapping[str, Tuple[str, ...]] = {
    "AllAlpha": ("LoggingAlphaOptions", NATIVE_HISTOGRAMS),
    "AllBeta": ("ComponentFlagz", "ComponentStatusz", "LoggingBetaOptions"),
}

_REMOVED: FrozenSet[str] = frozenset(
    (
        "EndpointSliceProxying",
        "KubeProxyDrainingTerminatingNodes",
        "LoadBalancerIPMode",
        "ProxyTerminatingEndpoints",
        "ServiceInternalTrafficPolicy",
        "ServiceTrafficDistribution",
        "TopologyAwareHints",
    )
)


def gate_problem(name: str, value: bool) -> str:
    """Why a feature gate cannot be set to ``value``, or empty text."""
    if name in _REMOVED:
        return "is no longer a feature gate in kube-proxy 1.36; remove it"
    if name not in DEFAULTS and name not in _GROUPS:
        return f"is not a feature gate of this proxy (known: {', '.join(sorted(DEFAULTS))})"
    if name in LOCKED and value != DEFAULTS[name]:
        return f"is locked to {str(DEFAULTS[name]).lower()}"
    return ""


def expanded(gates: Mapping[str, bool]) -> Dict[str, bool]:
    """``gates`` with AllAlpha and AllBeta spelled out; a gate that is named itself goes before its group."""
    spelled: Dict[str, bool] = {}
    for group, members in _GROUPS.items():
        if group in gates:
            spelled.update(dict.fromkeys(members, gates[group]))
    spelled.update({name: value for name, value in gates.items() if name not in _GROUPS})
    return spelled
