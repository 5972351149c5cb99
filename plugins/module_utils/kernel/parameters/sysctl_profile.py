# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel parameters that a mode requires on a given kernel, with a reason for each: a pure function.

The rules are kube-proxy 1.38's; where its choice depends on the kernel version, the reason says so.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Callable, Mapping, NamedTuple, Optional

from ...base.errors import ConfigurationError, errors_as
from .sysctls import HASH_SIZE, RESERVED_PORTS, TCP_BE_LIBERAL, AtLeast, Including, Wanted, port_ranges

#: The kernel parameter of each timeout of connection tracking, by its name in the model of the configuration and in the
#: module ``sysctls``.
CONNTRACK_TIMEOUTS: Mapping[str, str] = MappingProxyType(
    {
        "tcp_established_timeout": "net.netfilter.nf_conntrack_tcp_timeout_established",
        "tcp_close_wait_timeout": "net.netfilter.nf_conntrack_tcp_timeout_close_wait",
        "udp_timeout": "net.netfilter.nf_conntrack_udp_timeout",
        "udp_stream_timeout": "net.netfilter.nf_conntrack_udp_timeout_stream",
    }
)

#: Every kernel parameter that a profile may set, in any mode and on any kernel. A saved state may hold no others.
KEYS = frozenset(
    (
        "net.bridge.bridge-nf-call-ip6tables",
        "net.bridge.bridge-nf-call-iptables",
        "net.ipv4.conf.all.arp_announce",
        "net.ipv4.conf.all.arp_ignore",
        "net.ipv4.conf.all.route_localnet",
        "net.ipv4.ip_forward",
        "net.ipv4.vs.conn_reuse_mode",
        "net.ipv4.vs.conntrack",
        "net.ipv4.vs.expire_nodest_conn",
        "net.ipv4.vs.expire_quiescent_template",
        "net.ipv4.vs.run_estimation",
        "net.netfilter.nf_conntrack_max",
        HASH_SIZE,
        TCP_BE_LIBERAL,
        *CONNTRACK_TIMEOUTS.values(),
    )
)


class ConntrackProfile(NamedTuple):
    """Connection tracking settings; what is None, False or absent keeps the kernel's value.

    ``maximum``: entries of the table, already computed from cores. ``timeouts``: whole seconds by a name of
    CONNTRACK_TIMEOUTS.
    """

    maximum: Optional[int] = None
    timeouts: Mapping[str, int] = MappingProxyType({})
    be_liberal: bool = False


class ProfileSettings(NamedTuple):
    """The inputs that decide the parameters of a node."""

    mode: str
    kernel_version: tuple[int, int, int]
    strict_arp: bool = False
    #: Node ports answer on 127.0.0.1 (iptables mode, IPv4).
    route_localnet: bool = False
    #: False switches the IPVS rate estimators off where the kernel supports that; None keeps their state.
    estimation: Optional[bool] = None
    #: Bridged traffic passes iptables.
    bridge_netfilter: bool = False
    ipv6: bool = False
    conntrack: ConntrackProfile = ConntrackProfile()
    #: How ``conntrack.maximum`` was computed.
    maximum_reason: str = ""
    #: The most packets that may wait for a processor; None keeps the value.
    netdev_max_backlog: Optional[int] = None
    #: Port ranges that the kernel assigns to no program, such as ``30000-32767``; empty keeps the value.
    reserved_node_ports: str = ""


class Setting(NamedTuple):
    """A wanted value (None: deliberately not set) and the reason for it."""

    value: Optional[Wanted]
    why: str


def _version_text(version: tuple[int, int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _connection_reuse(version: tuple[int, int, int]) -> Setting:
    text = _version_text(version)
    if version < (4, 1, 0):
        why = f"not changed: kernel {text} does not have it; before 4.1 a reused client port keeps its old real server"
        return Setting(None, why)
    if version < (5, 9, 0):
        return Setting(
            0,
            f"kernel {text} is older than 5.9: with 1 a client that reuses a port loses its first packet and waits a"
            " second; with 0 it keeps its real server, which expire_nodest_conn corrects once that is removed",
        )
    why = f"not changed: since kernel 5.9 (here {text}) the default reschedules a reused port without loss"
    return Setting(None, why)


def _estimation(settings: ProfileSettings) -> Optional[Setting]:
    text = _version_text(settings.kernel_version)
    if settings.kernel_version < (5, 16, 0):
        if settings.estimation is None:
            return None
        return Setting(None, f"not changed: kernel {text} cannot switch its rate estimators (5.16 and later can)")
    timer = "run in kernel threads" if settings.kernel_version >= (6, 2, 0) else "run in a timer that delays packets"
    if settings.estimation is None:
        why = f"not changed: on kernel {text} rate estimators {timer}; 0 saves that where rates are not read"
        return Setting(None, why)
    return Setting(int(settings.estimation), f"as requested: on kernel {text} rate estimators {timer}")


def _ipvs(settings: ProfileSettings) -> dict[str, Setting]:
    chosen = {
        "net.ipv4.vs.conntrack": Setting(1, "IPVS connections must be in connection tracking to be masqueraded"),
        "net.ipv4.vs.conn_reuse_mode": _connection_reuse(settings.kernel_version),
        "net.ipv4.vs.expire_nodest_conn": Setting(1, "a connection whose real server was removed ends at once"),
        "net.ipv4.vs.expire_quiescent_template": Setting(1, "affinity ends for a real server of weight 0"),
        "net.ipv4.ip_forward": Setting(1, "packets for real servers on other machines are forwarded"),
    }
    estimation = _estimation(settings)
    if estimation is not None:
        chosen["net.ipv4.vs.run_estimation"] = estimation
    if settings.strict_arp:
        why = "strict ARP: addresses on kube-ipvs0 are not announced on other interfaces"
        chosen["net.ipv4.conf.all.arp_ignore"] = Setting(1, why)
        chosen["net.ipv4.conf.all.arp_announce"] = Setting(2, why)
    return chosen


def _iptables(settings: ProfileSettings) -> dict[str, Setting]:
    if not settings.route_localnet:
        return {}
    return {"net.ipv4.conf.all.route_localnet": Setting(1, "node ports answer on 127.0.0.1 (localhostNodePorts)")}


def _nothing(_settings: ProfileSettings) -> dict[str, Setting]:
    return {}


_OF_MODE: dict[str, Callable[[ProfileSettings], dict[str, Setting]]] = {
    "iptables": _iptables,
    "ipvs": _ipvs,
    "nftables": _nothing,
    "userspace": _nothing,
    "none": _nothing,
}
#: Modes that need no connection tracking, whose parameters may not even exist, or leave it to another service proxy.
_UNTRACKED = frozenset(("userspace", "none"))


def _conntrack(settings: ProfileSettings) -> dict[str, Setting]:
    wanted = settings.conntrack
    chosen: dict[str, Setting] = {}
    if wanted.maximum is not None:
        why = settings.maximum_reason or "requested"
        why = f"connection tracking table: {why}; larger values are not changed"
        chosen["net.netfilter.nf_conntrack_max"] = Setting(AtLeast(wanted.maximum), why)
        why = "a quarter of nf_conntrack_max, so that hash chains are short; larger values are not changed"
        chosen[HASH_SIZE] = Setting(AtLeast(wanted.maximum // 4), why)
    for name, seconds in wanted.timeouts.items():
        chosen[CONNTRACK_TIMEOUTS[name]] = Setting(seconds, "requested, in seconds")
    if wanted.be_liberal:
        chosen[TCP_BE_LIBERAL] = Setting(
            1, "requested: packets outside the TCP window are not INVALID, so the rule that drops those is omitted"
        )
    return chosen


def _for_the_node(settings: ProfileSettings) -> dict[str, Setting]:
    """Return the opt-in parameters of this project; kube-proxy sets none of them."""
    chosen: dict[str, Setting] = {}
    if settings.netdev_max_backlog is not None:
        packets = settings.netdev_max_backlog
        if packets < 1:
            raise ConfigurationError(f"profile.netdev_max_backlog: {packets} is not a number of packets")
        why = "requested: packets of pods wait in this queue; excess ones are dropped (/proc/net/softnet_stat)"
        chosen["net.core.netdev_max_backlog"] = Setting(AtLeast(packets), why)
    if settings.reserved_node_ports:
        with errors_as(ConfigurationError, "profile.reserved_node_ports", ConfigurationError):
            port_ranges(settings.reserved_node_ports)
        why = "requested: a program that the kernel assigned a node port to would get no packets; the Service would"
        chosen[RESERVED_PORTS] = Setting(Including(settings.reserved_node_ports), why)
    return chosen


def profile(settings: ProfileSettings) -> dict[str, Setting]:
    """Return key to wanted value and reason, for every parameter that the mode sets or deliberately does not set.

    Raises ConfigurationError for an unknown mode, a queue of no packets or an invalid list of port ranges.
    """
    if settings.mode not in _OF_MODE:
        raise ConfigurationError(f"mode {settings.mode!r}: not one of {', '.join(_OF_MODE)}")
    chosen = _OF_MODE[settings.mode](settings)
    if settings.bridge_netfilter:
        why = "pods on one bridge reach each other by Service address"
        chosen["net.bridge.bridge-nf-call-iptables"] = Setting(1, why)
        if settings.ipv6:
            chosen["net.bridge.bridge-nf-call-ip6tables"] = Setting(1, why)
    if settings.mode not in _UNTRACKED:
        chosen.update(_conntrack(settings))
    chosen.update(_for_the_node(settings))
    return chosen


def wanted_values(chosen: dict[str, Setting]) -> dict[str, Wanted]:
    """Return the part of a profile that is to be set: key to wanted value."""
    return {key: setting.value for key, setting in chosen.items() if setting.value is not None}


def explanations(chosen: dict[str, Setting]) -> list[dict[str, str]]:
    """Return a profile for a report: ``key``, ``value`` (empty if it is not set) and ``why`` of each entry."""
    rows = []
    for key, setting in chosen.items():
        value = setting.value or "" if not isinstance(setting.value, int) else str(int(setting.value))
        shown = f">= {value}" if isinstance(setting.value, AtLeast) else value
        if isinstance(setting.value, Including):
            shown = f"with {value}"
        rows.append({"key": key, "value": shown, "why": setting.why})
    return rows
