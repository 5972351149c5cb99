# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Validation of the values of a KubeProxyConfiguration; the types of its fields are checked when it is read."""

from __future__ import annotations

import re
from typing import Callable, Sequence, Tuple

from ..addresses import canonical_address, canonical_network, family_of, port_number
from ..cluster.fields import shown
from ..mode_names import IPVS, MODES, MODES_IN_EFFECT, NFTABLES
from .model import (
    BRIDGE_INTERFACE,
    CLUSTER_CIDR,
    DETECT_LOCAL_MODES,
    INTERFACE_NAME_PREFIX,
    PRIMARY,
    KubeProxyConfiguration,
)
from .reader import Findings

Problem = Callable[[str, str], None]

# Interface and scheduler names become part of rules and kernel messages. IFNAMSIZ and IP_VS_SCHEDNAME_MAXLEN are 16,
# including the final zero byte; the wildcard after an interface prefix takes one more character.
_INTERFACE = re.compile(r"[A-Za-z0-9_.@-]{1,15}")
_INTERFACE_PREFIX = re.compile(r"[A-Za-z0-9_.@-]{1,14}")
_SCHEDULER = re.compile(r"[a-z0-9_-]{1,15}")
_LOG_FORMATS = ("text", "json")


def validate(configuration: KubeProxyConfiguration, findings: Findings) -> None:
    """Record every problem of ``configuration`` in ``findings``, field by field."""
    _validate(configuration, MODES, findings.problem)


def _validate(configuration: KubeProxyConfiguration, modes: Sequence[str], problem: Problem) -> None:
    if configuration.mode not in modes:
        problem("mode", f"{shown(configuration.mode)} is not one of {', '.join(modes)}")
    if canonical_address(configuration.bind_address) is None:
        problem("bindAddress", f"{shown(configuration.bind_address)} is not an IP address")
    _host_and_port("healthzBindAddress", configuration.healthz_bind_address, problem)
    _host_and_port("metricsBindAddress", configuration.metrics_bind_address, problem)
    if configuration.config_sync_period <= 0:
        problem("configSyncPeriod", "must be greater than 0")
    if configuration.logging.format not in _LOG_FORMATS:
        problem("logging.format", f"{shown(configuration.logging.format)} is not text or json")
    _SECTIONS.get(configuration.mode, _iptables)(configuration, problem)
    _local_detection(configuration, problem)
    _node_port_addresses(configuration.node_port_addresses, problem)
    for name, value in (
        ("tcpEstablishedTimeout", configuration.conntrack.tcp_established_timeout),
        ("tcpCloseWaitTimeout", configuration.conntrack.tcp_close_wait_timeout),
        ("udpTimeout", configuration.conntrack.udp_timeout),
        ("udpStreamTimeout", configuration.conntrack.udp_stream_timeout),
    ):
        _not_negative(f"conntrack.{name}", value, problem)


def in_mode(configuration: KubeProxyConfiguration, mode: str) -> KubeProxyConfiguration:
    """Return the same configuration in another mode of MODES_IN_EFFECT.

    Fields that only matter in that mode are validated here. Raises ConfigurationError.
    """
    if mode == configuration.mode:
        return configuration
    changed = configuration._replace(mode=mode)
    findings = Findings()
    _validate(changed, MODES_IN_EFFECT, findings.problem)
    findings.raise_problems()
    return changed


def _iptables(configuration: KubeProxyConfiguration, problem: Problem) -> None:
    _periods("iptables", configuration.iptables.sync_period, configuration.iptables.min_sync_period, problem)


def _ipvs(configuration: KubeProxyConfiguration, problem: Problem) -> None:
    ipvs = configuration.ipvs
    _periods("ipvs", ipvs.sync_period, ipvs.min_sync_period, problem)
    for name, value in (
        ("tcpTimeout", ipvs.tcp_timeout),
        ("tcpFinTimeout", ipvs.tcp_fin_timeout),
        ("udpTimeout", ipvs.udp_timeout),
    ):
        _not_negative(f"ipvs.{name}", value, problem)
    _cidrs("ipvs.excludeCIDRs", ipvs.exclude_cidrs, problem)
    if ipvs.scheduler and _SCHEDULER.fullmatch(ipvs.scheduler) is None:
        problem("ipvs.scheduler", f"{shown(ipvs.scheduler)} is not a valid name of a scheduler")


def _nftables(configuration: KubeProxyConfiguration, problem: Problem) -> None:
    nftables = configuration.nftables
    _periods("nftables", nftables.sync_period, nftables.min_sync_period, problem)
    if not 0 <= nftables.masquerade_bit <= 31:
        problem("nftables.masqueradeBit", f"{nftables.masquerade_bit} is not between 0 and 31")


#: Sections that are validated only in the mode of the same name, as by kube-proxy 1.36; other modes have the periods of
#: the section iptables, whose other fields are validated in every mode when they are read.
_SECTIONS = {IPVS: _ipvs, NFTABLES: _nftables}


def _periods(block: str, sync_period: float, min_sync_period: float, problem: Problem) -> None:
    if sync_period <= 0:
        problem(f"{block}.syncPeriod", "must be greater than 0")
    _not_negative(f"{block}.minSyncPeriod", min_sync_period, problem)
    if 0 < sync_period < min_sync_period:
        problem(f"{block}.minSyncPeriod", f"must not be greater than {block}.syncPeriod")


def _not_negative(field: str, seconds: float, problem: Problem) -> None:
    if seconds < 0:
        problem(field, "must not be negative")


def _cidrs(field: str, values: Sequence[str], problem: Problem) -> None:
    for index, value in enumerate(values):
        if canonical_network(value) is None:
            problem(f"{field}[{index}]", f"{shown(value)} is not a CIDR")


def _local_detection(configuration: KubeProxyConfiguration, problem: Problem) -> None:
    mode = configuration.detect_local_mode
    if mode not in DETECT_LOCAL_MODES:
        problem("detectLocalMode", f"{shown(mode)} is not one of {', '.join(DETECT_LOCAL_MODES)}")
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


def _node_port_addresses(values: Tuple[str, ...], problem: Problem) -> None:
    for index, value in enumerate(values):
        if value != PRIMARY and canonical_network(value) is None:
            problem(f"nodePortAddresses[{index}]", f"{shown(value)} is not a CIDR, primary, localhost or all")


def split_host_port(value: str) -> Tuple[str, int]:
    """Parse ``1.2.3.4:80`` or ``[::]:80`` and return the canonical address and the port. Raises ValueError."""
    if value.startswith("["):
        host, bracket, port = value[1:].partition("]:")
        if not bracket or ":" not in host:
            raise ValueError(f"{shown(value)} is not ADDRESS:PORT")
    else:
        host, colon, port = value.rpartition(":")
        if not colon or ":" in host:
            raise ValueError(f"{shown(value)} is not ADDRESS:PORT")
    address = canonical_address(host)
    if address is None:
        raise ValueError(f"{shown(host)} is not an IP address")
    number = port_number(port)
    if number is None:
        raise ValueError(f"{shown(port)} is not a port between 1 and 65535")
    return address, number


def _host_and_port(field: str, value: str, problem: Problem) -> None:
    try:
        split_host_port(value)
    except ValueError as error:
        problem(field, str(error))
