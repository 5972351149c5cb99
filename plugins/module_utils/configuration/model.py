# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1) as an immutable value with all defaults filled in.

Durations are seconds. Fields that only matter to kube-proxy on Windows are omitted.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

from ..base.mode_names import IPTABLES, IPVS, NFTABLES, USERSPACE
from .behaviour import Behaviour, masquerade_ports
from .feature_gates import DEFAULTS
from .node_proxy import NodeProxyConfiguration

API_VERSION = "kubeproxy.config.k8s.io/v1alpha1"
KIND = "KubeProxyConfiguration"

PRIMARY = "primary"

LONGEST_CHECK_PERIOD = 3600.0
_DEBUG_VERBOSITY = 4
#: The size of the connection tracking table at which scaling with cores stops.
_SCALED_LIMIT = 1048576

CLUSTER_CIDR = "ClusterCIDR"
NODE_CIDR = "NodeCIDR"
BRIDGE_INTERFACE = "BridgeInterface"
INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"
DETECT_LOCAL_MODES: tuple[str, ...] = (CLUSTER_CIDR, NODE_CIDR, BRIDGE_INTERFACE, INTERFACE_NAME_PREFIX)


class ClientConnection(NamedTuple):
    """clientConnection: how to connect to the API server."""

    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = "application/vnd.kubernetes.protobuf"
    qps: float = 5.0
    burst: int = 10


class IPTablesConfiguration(NamedTuple):
    """iptables. masqueradeBit and masqueradeAll also apply to ipvs mode."""

    masquerade_bit: int = 14
    masquerade_all: bool = False
    localhost_node_ports: bool = True
    sync_period: float = 30.0
    min_sync_period: float = 1.0


class IPVSConfiguration(NamedTuple):
    """ipvs. An empty scheduler means rr; a timeout of 0 keeps the kernel's."""

    sync_period: float = 30.0
    min_sync_period: float = 0.0
    scheduler: str = ""
    exclude_cidrs: tuple[str, ...] = ()
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


_OwnSection = Union[IPTablesConfiguration, IPVSConfiguration, NFTablesConfiguration]


class _Effect(NamedTuple):
    """Which fields have an effect in a mode.

    ``own_masquerade``: masqueradeBit and masqueradeAll of the section nftables, not those of iptables. ``ipvs``: fields
    of the section ipvs. ``localhost_node_ports``: iptables.localhostNodePorts. ``localhost_listeners``: loopback
    addresses among nodePortAddresses; others are rejected (KEP-6032). ``node_port_addresses``: the default.
    """

    own_masquerade: bool = False
    ipvs: bool = False
    localhost_node_ports: bool = False
    localhost_listeners: bool = False
    node_port_addresses: tuple[str, ...] = ()


_EFFECTS = {
    IPTABLES: _Effect(localhost_node_ports=True),
    IPVS: _Effect(ipvs=True),
    NFTABLES: _Effect(own_masquerade=True, localhost_listeners=True, node_port_addresses=(PRIMARY,)),
    USERSPACE: _Effect(),
}


class ConntrackConfiguration(NamedTuple):
    """conntrack. 0 keeps the kernel's value; ``min`` has no effect when ``max_per_core`` is 0."""

    max_per_core: int = 32768
    min: int = 131072
    tcp_established_timeout: float = 86400.0
    tcp_close_wait_timeout: float = 3600.0
    tcp_be_liberal: bool = False
    udp_timeout: float = 0.0
    udp_stream_timeout: float = 0.0

    def maximum(self, cores: int) -> Optional[int]:
        """Return the value for nf_conntrack_max as kube-proxy 1.36 computes it, or None to keep the kernel's value.

        If scaling with the cores exceeds its limit, the value is that limit, even if the minimum is larger.
        """
        if self.max_per_core <= 0:
            return None
        scaled = self.max_per_core * cores
        return _SCALED_LIMIT if scaled > _SCALED_LIMIT else max(scaled, self.min)

    def options(self) -> dict[str, int]:
        """Return the fields as options of the module ``sysctls``: flags, and whole numbers."""
        return {name: int(value) if isinstance(value, float) else value for name, value in self._asdict().items()}


class DetectLocal(NamedTuple):
    """detectLocal: the parameters of two of the detectLocalModes."""

    bridge_interface: str = ""
    interface_name_prefix: str = ""


class Logging(NamedTuple):
    """logging. ``rest`` holds the fields that have no effect, only to show them in /configz."""

    format: str = "text"
    flush_frequency: float = 5.0
    verbosity: int = 0
    rest: tuple[tuple[str, Any], ...] = ()


class KubeProxyConfiguration(NamedTuple):
    """A complete configuration. ``KubeProxyConfiguration()`` equals the configuration in an empty file.

    ``mode`` and ``detect_local_mode`` are never empty. ``node_port_addresses`` holds CIDRs and perhaps the word
    ``primary``; see ``effective_node_port_addresses``. ``cluster_cidrs`` are the elements of clusterCIDR.
    ``node_proxy`` is the other document of the file, which kube-proxy does not know. All addresses and CIDRs are
    canonical.
    """

    mode: str = IPTABLES
    feature_gates: tuple[tuple[str, bool], ...] = ()
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
    cluster_cidrs: tuple[str, ...] = ()
    node_port_addresses: tuple[str, ...] = ()
    oom_score_adj: int = -999
    conntrack: ConntrackConfiguration = ConntrackConfiguration()
    config_sync_period: float = 900.0
    port_range: str = ""
    node_proxy: NodeProxyConfiguration = NodeProxyConfiguration()

    @property
    def sync_period(self) -> float:
        """The syncPeriod of the mode in effect, in seconds."""
        return self._own.sync_period

    @property
    def min_sync_period(self) -> float:
        """The minSyncPeriod of the mode in effect, in seconds."""
        return self._own.min_sync_period

    @property
    def check_period(self) -> float:
        """Seconds between full checks of the kernel's state, at most an hour as in kube-proxy 1.36."""
        longest = self.ipvs.sync_period if self._effect.ipvs else LONGEST_CHECK_PERIOD
        return min(self.config_sync_period, longest, LONGEST_CHECK_PERIOD)

    @property
    def debug_logging(self) -> bool:
        """Whether to log debug lines: logging.verbosity is 4 or more, the debug level of Kubernetes."""
        return self.logging.verbosity >= _DEBUG_VERBOSITY

    @property
    def masquerade_all(self) -> bool:
        """The masqueradeAll in effect: the nftables one in that mode, else the iptables one."""
        return self._masquerade.masquerade_all

    @property
    def masquerade_mark(self) -> int:
        """The packet mark in effect as a number, 0x4000 by default."""
        return 1 << self._masquerade.masquerade_bit

    @property
    def scheduler(self) -> str:
        """The IPVS scheduler in effect."""
        return self.ipvs.scheduler or "rr"

    @property
    def effective_node_port_addresses(self) -> tuple[str, ...]:
        """CIDRs and perhaps the word ``primary``, the default of nftables mode; empty for all addresses."""
        return self.node_port_addresses or self._effect.node_port_addresses

    @property
    def behaviour(self) -> Behaviour:
        """Which of kube-proxy's defects are corrected."""
        return self.node_proxy.behaviour.behaviour

    @property
    def masquerade_ports(self) -> tuple[int, int]:
        """The first and last source port for masquerading; (0, 0) if the kernel chooses from all ports."""
        settings = self.node_proxy.behaviour
        return masquerade_ports(settings.node_ports) if settings.behaviour.masquerade_below_node_ports else (0, 0)

    def gate(self, name: str) -> bool:
        """Return whether a feature gate is enabled. ``name`` must be one of ``feature_gates.DEFAULTS``."""
        return dict(self.feature_gates).get(name, DEFAULTS[name])

    @property
    def uses_ipvs(self) -> bool:
        """Whether the mode serves Services through IPVS."""
        return self._effect.ipvs

    @property
    def effective_schedulers(self) -> tuple[str, ...]:
        """The IPVS scheduler in a mode that uses IPVS, else none."""
        return (self.scheduler,) if self._effect.ipvs else ()

    @property
    def effective_exclude_cidrs(self) -> tuple[str, ...]:
        """ipvs.excludeCIDRs in a mode that uses IPVS, else none."""
        return self.ipvs.exclude_cidrs if self._effect.ipvs else ()

    @property
    def effective_strict_arp(self) -> bool:
        """ipvs.strictARP, in a mode that uses IPVS."""
        return self._effect.ipvs and self.ipvs.strict_arp

    @property
    def effective_localhost_node_ports(self) -> bool:
        """iptables.localhostNodePorts, in the mode that can serve node ports on loopback addresses."""
        return self._effect.localhost_node_ports and self.iptables.localhost_node_ports

    @property
    def effective_localhost_listeners(self) -> bool:
        """Whether node ports at loopback addresses need listeners of the agent, or are rejected (KEP-6032)."""
        return self._effect.localhost_listeners

    @property
    def _effect(self) -> _Effect:
        return _EFFECTS.get(self.mode, _EFFECTS[IPTABLES])

    @property
    def _own(self) -> _OwnSection:
        sections: dict[str, _OwnSection] = {IPTABLES: self.iptables, IPVS: self.ipvs, NFTABLES: self.nftables}
        return sections.get(self.mode, self.iptables)

    @property
    def _masquerade(self) -> Union[IPTablesConfiguration, NFTablesConfiguration]:
        return self.nftables if self._effect.own_masquerade else self.iptables
