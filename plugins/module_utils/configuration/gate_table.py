# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The feature gates of kube-proxy 1.38, from the table in tests/parity: written by make docs."""

from __future__ import annotations

from typing import Mapping, NamedTuple


class Gate(NamedTuple):
    """A feature gate: its default, its stage as metrics name it, and whether it cannot be changed."""

    default: bool
    stage: str
    locked: bool


GATES: Mapping[str, Gate] = {
    "AllowServiceExternalIPs": Gate(True, "", False),
    "ComponentFlagz": Gate(True, "BETA", False),
    "ComponentStatusz": Gate(True, "BETA", False),
    "ContextualLogging": Gate(True, "BETA", False),
    "KubeProxyIPVS": Gate(True, "", False),
    "KubeProxyNFTablesLocalhostNodePorts": Gate(True, "BETA", False),
    "LoggingAlphaOptions": Gate(False, "ALPHA", False),
    "LoggingBetaOptions": Gate(True, "BETA", False),
    "MultiCIDRServiceAllocator": Gate(True, "", True),
    "NFTablesNetlink": Gate(True, "BETA", False),
    "NFTablesProxyMode": Gate(True, "", True),
    "NativeHistograms": Gate(False, "ALPHA", False),
    "PreferSameTrafficDistribution": Gate(True, "", True),
}
REMOVED: tuple[str, ...] = (
    "EndpointSliceProxying",
    "KubeProxyDrainingTerminatingNodes",
    "LoadBalancerIPMode",
    "ProxyTerminatingEndpoints",
    "ServiceInternalTrafficPolicy",
    "ServiceTrafficDistribution",
    "TopologyAwareHints",
)
