# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The effect of each field of a KubeProxyConfiguration: one row per field, for warnings and for the documentation.

A test compares the rows with the code: only fields that have an effect are read outside this package. The rows of a
NodeProxyConfiguration are in ``node_proxy``.
"""

from __future__ import annotations

from typing import Any, List, Mapping, Tuple

from .feature_gates import GATES, LATER_GATES, REMOVED_GATES
from .field import AGENT, HONOURED, NOTHING, PARTLY, Field
from .model import KubeProxyConfiguration

_ALL, _IPTABLES, _IPVS, _NFTABLES, _NONE = "all", "iptables", "ipvs", "nftables", "-"
_JSON = "application/json"


FIELDS: Tuple[Field, ...] = (
    Field("mode", "mode", "`iptables`", _NONE, HONOURED, "`iptables`, `ipvs`, `nftables` or `userspace`"),
    Field("featureGates", "feature_gates", "none", _ALL, PARTLY, "see [Feature gates](#feature-gates)"),
    Field(
        "clientConnection.kubeconfig",
        "client_connection.kubeconfig",
        "credentials of the pod",
        _ALL,
        AGENT,
        "credentials for the API server, and its address; the node command uses it too",
    ),
    Field(
        "clientConnection.qps",
        "client_connection.qps",
        "5",
        _ALL,
        NOTHING,
        "the agent sends few requests: a list and a watch of each of four kinds, with network policies of up to eight, "
        "and events",
    ),
    Field("clientConnection.burst", "client_connection.burst", "10", _ALL, NOTHING, "see `clientConnection.qps`"),
    Field(
        "clientConnection.contentType",
        "client_connection.content_type",
        "protobuf",
        _NONE,
        NOTHING,
        "requests are sent with JSON",
        (_JSON,),
    ),
    Field(
        "clientConnection.acceptContentTypes",
        "client_connection.accept_content_types",
        "none",
        _NONE,
        NOTHING,
        "requests are sent with JSON",
        (_JSON,),
    ),
    Field("logging.format", "logging.format", "`text`", _ALL, AGENT, "`text` or `json`"),
    Field(
        "logging.verbosity",
        "logging.verbosity",
        "0",
        _ALL,
        AGENT,
        "4 and more: also debug lines; smaller numbers have no effect",
    ),
    Field(
        "logging.flushFrequency",
        "logging.flush_frequency",
        "`5s`",
        _NONE,
        NOTHING,
        "each line is written at once",
        (0.0,),
    ),
    Field("logging.vmodule", "", "none", _NONE, NOTHING, "there are no Go source files to select"),
    Field("logging.options", "", "none", _NONE, NOTHING, "each line is written at once, to standard error"),
    Field(
        "hostnameOverride",
        "hostname_override",
        "the node's host name",
        _ALL,
        HONOURED,
        "name of the Node; surrounding blanks are removed, letters made lower case",
    ),
    Field(
        "bindAddress",
        "bind_address",
        "`0.0.0.0`",
        _ALL,
        HONOURED,
        "a specific address replaces the node's own address and decides which IP family is primary; no socket is"
        " bound to it",
    ),
    Field(
        "healthzBindAddress",
        "healthz_bind_address",
        "`0.0.0.0:10256`, or `[::]:10256` with an IPv6 bindAddress",
        _ALL,
        AGENT,
        "health endpoints; port 10256 if only an address is given",
    ),
    Field(
        "metricsBindAddress",
        "metrics_bind_address",
        "`127.0.0.1:10249`, or `[::1]:10249`",
        _ALL,
        AGENT,
        "metrics; port 10249 if only an address is given",
    ),
    Field(
        "bindAddressHardFail",
        "bind_address_hard_fail",
        "`false`",
        _ALL,
        AGENT,
        "a health or metrics address that cannot be bound ends the agent",
    ),
    Field(
        "enableProfiling",
        "enable_profiling",
        "`false`",
        _ALL,
        NOTHING,
        "profiling pages exist only in Go programs",
    ),
    Field(
        "showHiddenMetricsForVersion",
        "show_hidden_metrics_for_version",
        "none",
        _ALL,
        NOTHING,
        "no metric is hidden",
    ),
    Field(
        "iptables.masqueradeBit",
        "iptables.masquerade_bit",
        "14",
        "iptables, ipvs",
        HONOURED,
        "bit of the packet mark, 0 to 31",
    ),
    Field(
        "iptables.masqueradeAll",
        "iptables.masquerade_all",
        "`false`",
        "iptables, ipvs",
        HONOURED,
        "masquerade all traffic to cluster IPs",
    ),
    Field(
        "iptables.localhostNodePorts",
        "iptables.localhost_node_ports",
        "`true`",
        "iptables, IPv4",
        HONOURED,
        "node ports also answer on 127.0.0.1; off if `nodePortAddresses` does not include loopback",
    ),
    Field(
        "iptables.snatNodeInternalIP",
        "",
        "`false`",
        _IPTABLES,
        NOTHING,
        "new in Kubernetes 1.37; the kernel chooses the address used for masquerading",
    ),
    Field(
        "iptables.syncPeriod",
        "iptables.sync_period",
        "`30s`",
        _IPTABLES,
        AGENT,
        "time until a failed sync is retried, and half the time after which health fails; greater than 0",
    ),
    Field(
        "iptables.minSyncPeriod",
        "iptables.min_sync_period",
        "`1s`",
        _IPTABLES,
        AGENT,
        "minimum time between syncs; at most syncPeriod",
    ),
    Field(
        "ipvs.syncPeriod",
        "ipvs.sync_period",
        "`30s`",
        _IPVS,
        AGENT,
        "as for iptables, and the time between [full checks](#full-checks)",
    ),
    Field("ipvs.minSyncPeriod", "ipvs.min_sync_period", "`0s`", _IPVS, AGENT, "as for iptables"),
    Field(
        "ipvs.scheduler",
        "ipvs.scheduler",
        "`rr`",
        _IPVS,
        HONOURED,
        "scheduler of all virtual servers; its kernel module must exist",
    ),
    Field(
        "ipvs.excludeCIDRs",
        "ipvs.exclude_cidrs",
        "none",
        _IPVS,
        HONOURED,
        "virtual servers in these ranges belong to other programs and are not touched",
    ),
    Field(
        "ipvs.strictARP", "ipvs.strict_arp", "`false`", _IPVS, HONOURED, "sets arp_ignore to 1 and arp_announce to 2"
    ),
    Field("ipvs.tcpTimeout", "ipvs.tcp_timeout", "`0s`", _IPVS, HONOURED, "IPVS timeout; 0 keeps the kernel's"),
    Field("ipvs.tcpFinTimeout", "ipvs.tcp_fin_timeout", "`0s`", _IPVS, HONOURED, "IPVS timeout; 0 keeps the kernel's"),
    Field("ipvs.udpTimeout", "ipvs.udp_timeout", "`0s`", _IPVS, HONOURED, "IPVS timeout; 0 keeps the kernel's"),
    Field("nftables.masqueradeBit", "nftables.masquerade_bit", "14", _NFTABLES, HONOURED, "as for iptables"),
    Field("nftables.masqueradeAll", "nftables.masquerade_all", "`false`", _NFTABLES, HONOURED, "as for iptables"),
    Field("nftables.syncPeriod", "nftables.sync_period", "`30s`", _NFTABLES, AGENT, "as for iptables"),
    Field("nftables.minSyncPeriod", "nftables.min_sync_period", "`1s`", _NFTABLES, AGENT, "as for iptables"),
    Field("winkernel", "", "-", _NONE, NOTHING, "for Windows"),
    Field(
        "detectLocalMode",
        "detect_local_mode",
        "`ClusterCIDR`",
        _ALL,
        HONOURED,
        "how traffic of this node's pods is recognised; see [below](#how-pods-of-this-node-are-recognised)",
    ),
    Field(
        "detectLocal.bridgeInterface",
        "detect_local.bridge_interface",
        "none",
        _ALL,
        HONOURED,
        "required by `BridgeInterface`",
    ),
    Field(
        "detectLocal.interfaceNamePrefix",
        "detect_local.interface_name_prefix",
        "none",
        _ALL,
        HONOURED,
        "required by `InterfaceNamePrefix`",
    ),
    Field(
        "clusterCIDR",
        "cluster_cidrs",
        "none",
        _ALL,
        HONOURED,
        "ranges of all pods: one CIDR, or one per IP family",
    ),
    Field(
        "nodePortAddresses",
        "node_port_addresses",
        "all addresses; `primary` in nftables mode",
        _ALL,
        HONOURED,
        "CIDRs of the node's addresses on which node ports answer, or the words `primary`, `localhost`, `all`",
    ),
    Field(
        "oomScoreAdj",
        "oom_score_adj",
        "-999",
        _ALL,
        PARTLY,
        "-1000 to 1000; set by the unit that the role `agent` installs",
    ),
    Field(
        "conntrack.maxPerCore",
        "conntrack.max_per_core",
        "32768",
        _ALL,
        HONOURED,
        "size of the connection tracking table per core, at most 1048576; 0 keeps the kernel's limit",
    ),
    Field(
        "conntrack.min",
        "conntrack.min",
        "131072",
        _ALL,
        HONOURED,
        "minimum size of the table; no effect if maxPerCore is 0 or reaches the limit of 1048576",
    ),
    Field(
        "conntrack.tcpEstablishedTimeout",
        "conntrack.tcp_established_timeout",
        "`24h`",
        _ALL,
        HONOURED,
        "0 keeps the kernel's",
    ),
    Field(
        "conntrack.tcpCloseWaitTimeout",
        "conntrack.tcp_close_wait_timeout",
        "`1h`",
        _ALL,
        HONOURED,
        "0 keeps the kernel's",
    ),
    Field(
        "conntrack.tcpBeLiberal",
        "conntrack.tcp_be_liberal",
        "`false`",
        _ALL,
        HONOURED,
        "`true` sets nf_conntrack_tcp_be_liberal; `false` does not change it",
    ),
    Field("conntrack.udpTimeout", "conntrack.udp_timeout", "`0s`", _ALL, HONOURED, "0 keeps the kernel's"),
    Field("conntrack.udpStreamTimeout", "conntrack.udp_stream_timeout", "`0s`", _ALL, HONOURED, "0 keeps the kernel's"),
    Field(
        "configSyncPeriod",
        "config_sync_period",
        "`15m`",
        _ALL,
        AGENT,
        "time between [full checks](#full-checks), at most an hour",
    ),
    Field("portRange", "port_range", "none", _NONE, NOTHING, "kube-proxy does not use it either"),
    Field("windowsRunAsService", "", "-", _NONE, NOTHING, "for Windows"),
)


def without_effect(configuration: KubeProxyConfiguration, source: Mapping[str, Any]) -> List[str]:
    """Return a warning for each field and feature gate that has no effect and is not set to its default.

    ``source``: the fields as they were read, for those that the model does not have.
    """
    found = []
    for field in FIELDS:
        if field.effect != NOTHING:
            continue
        if field.attribute:
            value = value_of(configuration, field.attribute)
            given = value != value_of(KubeProxyConfiguration(), field.attribute) and value not in field.harmless
        else:
            given = not _is_zero(given_value(source, field.name))
        if given:
            found.append(f"{field.name}: has no effect here: {field.text}")
    for name, on in configuration.feature_gates:
        gate = GATES[name]
        if not gate.effect and on != gate.default:
            found.append(f"featureGates.{name}: has no effect here")
    gates = source.get("featureGates")
    for name in gates if isinstance(gates, Mapping) else ():
        if name in LATER_GATES:
            found.append(f"featureGates.{name}: has no effect here: {LATER_GATES[name]}")
        elif name in REMOVED_GATES:
            found.append(f"featureGates.{name}: has no effect: it is no longer a feature gate in kube-proxy 1.36")
    return found


def value_of(configuration: KubeProxyConfiguration, attribute: str) -> Any:
    """Return the value of a field by its attribute in the model, with dots."""
    value: Any = configuration
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def given_value(source: Mapping[str, Any], name: str) -> Any:
    """Return the value that a document gives a field, by its name with dots; None if it gives none."""
    value: Any = source
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _is_zero(value: Any) -> bool:
    """Return whether a value is Go's zero value (at any depth), which kubeadm writes for an unset field."""
    if isinstance(value, Mapping):
        return all(map(_is_zero, value.values()))
    return not value or value == "0"
