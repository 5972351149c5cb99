# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1) as an immutable value with all defaults filled in.

Durations are seconds. Fields that only matter to kube-proxy on Windows are left out.
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Tuple

from .feature_gates import DEFAULTS

API_VERSION = "kubeproxy.config.k8s.io/v1alpha1"
KIND = "KubeProxyConfiguration"

IPTABLES = "iptables"
IPVS = "ipvs"
NFTABLES = "nftables"
MODES: Tuple[str, ...] = (IPTABLES, IPVS, NFTABLES)

PRIMARY = "primary"

LONGEST_CHECK_PERIOD = 3600.0
_DEBUG_VERBOSITY = 4

CLUSTER_CIDR = "ClusterCIDR"
NODE_CIDR = "NodeCIDR"
BRIDGE_INTERFACE = "BridgeInterface"
INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"
DETECT_LOCAL_MODES: Tuple[str, ...] = (CLUSTER_CIDR, NODE_CIDR, BRIDGE_INTERFACE, INTERFACE_NAME_PREFIX)


class ClientConnection(NamedTuple):
    """clientConnection: how the API server is reached."""

    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = "application/vnd.kubernetes.protobuf"
    qps: float = 5.0
    burst: int = 10


class IPTablesConfiguration(NamedTuple):
    """iptables: masqueradeBit and masqueradeAll also rule ipvs mode."""

    masquerade_bit: int = 14
    masquerade_all: bool = False
    localhost_node_ports: bool = True
    sync_period: float = 30.0
    min_sync_period: float = 1.0


class IPVSConfiguration(NamedTuple):
    """ipvs. An empty scheduler stands for rr; a timeout of 0 leaves the kernel's alone."""

    sync_period: float = 30.0
    min_sync_period: float = 0.0
    scheduler: str = ""
    exclude_cidrs: Tuple[str, ...] = ()
    strict_arp: bool = False
    tcp_timeout: float = 0.0
    tcp_fin_timeout: float = 0.0
    udp_timeout: float = 0.0


class NFTablesConfiguration(NamedTuple):
    """nftables."""

    masquerade_bit: int = 14
    masquerade_all: bool = False
    sync_period: float = 30.0
    min_sync_period: float = 1.0


class ConntrackConfiguration(NamedTuple):
    """conntrack. 0 leaves the kernel's value alone; ``min`` has no effect when ``max_per_core`` is 0."""

    max_per_core: int = 32768
    min: int = 131072
    tcp_established_timeout: float = 86400.0
    tcp_close_wait_timeout: float = 3600.0
    tcp_be_liberal: bool = False
    udp_timeout: float = 0.0
    udp_stream_timeout: float = 0.0


class DetectLocal(NamedTuple):
    """detectLocal: the parameters of two of the detectLocalModes."""

    bridge_interface: str = ""
    interface_name_prefix: str = ""


class Logging(NamedTuple):
    """logging: ``rest`` holds the fields that are only carried along."""

    format: str = "text"
    flush_frequency: float = 5.0
    verbosity: int = 0
    rest: Tuple[Tuple[str, Any], ...] = ()


class KubeProxyConfiguration(NamedTuple):
    """A whole configuration. ``KubeProxyConfiguration()`` is what an empty file gives.

    ``mode`` and ``detect_local_mode`` are never empty. ``node_port_addresses`` holds CIDRs and perhaps the word
    ``primary``; see ``effective_node_port_addresses``.
    ``cluster_cidrs`` are the elements of clusterCIDR. All addresses and CIDRs are canonical.
    """

    mode: str = IPTABLES
    feature_gates: Tuple[Tuple[str, bool], ...] = ()
    client_connection: ClientConnection = ClientConnection()
    logging: Logging = Logging()
    hostname_override: str = ""
    bind_address: str = "0.0.0.0"
    healthz_bind_address: str = "0.0.0.0:10256"
    metrics_bind_address: str = "127.0.0.1:10249"
    bind_address_hard_fail: bool = False
    enable_profiling: bool = False
    show_hidden_metrics_for_version: str = ""
    iptables: IPTablesConfiguration = IPTablesConfiguration()
    ipvs: IPVSConfiguration = IPVSConfiguration()
    nftables: NFTablesConfiguration = NFTablesConfiguration()
    detect_local_mode: str = CLUSTER_CIDR
    detect_local: DetectLocal = DetectLocal()
    cluster_cidrs: Tuple[str, ...] = ()
    node_port_addresses: Tuple[str, ...] = ()
    oom_score_adj: int = -999
    conntrack: ConntrackConfiguration = ConntrackConfiguration()
    config_sync_period: float = 900.0
    port_range: str = ""

    @property
    def sync_period(self) -> float:
        """Seconds: the syncPeriod of the mode in effect."""
        return self._periods()[0]

    @property
    def min_sync_period(self) -> float:
        """Seconds: the minSyncPeriod of the mode in effect."""
        return self._periods()[1]

    @property
    def check_period(self) -> float:
        """Seconds between two comparisons of everything with the kernel; kube-proxy 1.36 waits an hour at most."""
        longest = self.ipvs.sync_period if self.mode == IPVS else LONGEST_CHECK_PERIOD
        return min(self.config_sync_period, longest, LONGEST_CHECK_PERIOD)

    @property
    def debug_logging(self) -> bool:
        """Whether debug lines are wanted: logging.verbosity is 4 or more, as Kubernetes uses the number."""
        return self.logging.verbosity >= _DEBUG_VERBOSITY

    @property
    def masquerade_all(self) -> bool:
        """The masqueradeAll in effect: the nftables one in that mode, else the iptables one."""
        return self.nftables.masquerade_all if self.mode == NFTABLES else self.iptables.masquerade_all

    @property
    def masquerade_mark(self) -> int:
        """The packet mark in effect as a number, 0x4000 by default."""
        bit = self.nftables.masquerade_bit if self.mode == NFTABLES else self.iptables.masquerade_bit
        return 1 << bit

    @property
    def scheduler(self) -> str:
        """The IPVS scheduler in effect."""
        return self.ipvs.scheduler or "rr"

    @property
    def effective_node_port_addresses(self) -> Tuple[str, ...]:
        """CIDRs and perhaps the word ``primary``, the default of nftables mode; empty for all addresses."""
        if not self.node_port_addresses and self.mode == NFTABLES:
            return (PRIMARY,)
        return self.node_port_addresses

    def gate(self, name: str) -> bool:
        """Whether a feature gate is on. ``name`` must be one of ``feature_gates.DEFAULTS``."""
        return dict(self.feature_gates).get(name, DEFAULTS[name])

    def with_mode(self, mode: str) -> KubeProxyConfiguration:
        """The same configuration in another mode of MODES.

        Fields that only matter in that mode are validated now. Raises ConfigurationError.
        """
        if mode == self.mode:
            return self
        from .reader import Findings
        from .validate import validate  # It needs this module itself.

        changed = self._replace(mode=mode)
        findings = Findings()
        validate(changed, findings)
        findings.raise_problems()
        return changed

    def _periods(self) -> Tuple[float, float]:
        if self.mode == IPVS:
            return self.ipvs.sync_period, self.ipvs.min_sync_period
        if self.mode == NFTABLES:
            return self.nftables.sync_period, self.nftables.min_sync_period
        return self.iptables.sync_period, self.iptables.min_sync_period


def gates_in_effect(configuration: KubeProxyConfiguration) -> Dict[str, bool]:
    """All feature gates by name, sorted, with the value in effect."""
    return {name: configuration.gate(name) for name in sorted(DEFAULTS)}
