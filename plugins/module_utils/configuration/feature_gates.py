# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The effects here of kube-proxy's feature gates, and how their settings are read."""

from __future__ import annotations

from typing import Mapping

from .gate_table import GATES

ALLOW_SERVICE_EXTERNAL_IPS = "AllowServiceExternalIPs"
COMPONENT_FLAGZ = "ComponentFlagz"
COMPONENT_STATUSZ = "ComponentStatusz"
LOCALHOST_NODE_PORTS = "KubeProxyNFTablesLocalhostNodePorts"

ALPHA, BETA = "ALPHA", "BETA"

EFFECTS: Mapping[str, str] = {
    ALLOW_SERVICE_EXTERNAL_IPS: "off: `spec.externalIPs` are not served",
    COMPONENT_FLAGZ: "off: no page `/flagz`",
    COMPONENT_STATUSZ: "off: no page `/statusz`",
    LOCALHOST_NODE_PORTS: "off: in nftables mode node ports on loopback addresses are neither served nor rejected",
}
"""What a gate does here; others have no effect."""

REASONS: Mapping[str, str] = {
    "KubeProxyIPVS": "ipvs mode is always available",
    "NFTablesNetlink": "nftables mode always uses netlink",
}
"""Why a gate has no effect here, if that is not evident."""

DEFAULTS: Mapping[str, bool] = {name: gate.default for name, gate in GATES.items()}
"""Default value by name."""

_GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(name for name, gate in GATES.items() if gate.stage == stage)
    for group, stage in (("AllAlpha", ALPHA), ("AllBeta", BETA))
}


def is_known(name: str) -> bool:
    """Return whether kube-proxy has a feature gate, or a group of feature gates, of that name."""
    return name in GATES or name in _GROUPS


def locked_problem(name: str, value: bool) -> str:
    """Return why a feature gate cannot be set to ``value``, or empty text."""
    gate = GATES.get(name)
    if gate is not None and gate.locked and value != gate.default:
        return f"is locked to {str(gate.default).lower()}"
    return ""


def expanded(gates: Mapping[str, bool]) -> dict[str, bool]:
    """Return ``gates`` with AllAlpha and AllBeta expanded; an explicit gate takes precedence over its group."""
    spelled: dict[str, bool] = {}
    for group, members in _GROUPS.items():
        if group in gates:
            spelled.update(dict.fromkeys(members, gates[group]))
    spelled.update({name: value for name, value in gates.items() if name not in _GROUPS})
    return spelled
