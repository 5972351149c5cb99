# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fields of a KubeProxyConfiguration: one row per field.

Reading, validation, writing, warnings and the documentation follow from the rows; types and defaults are those of the
model. A test compares the rows with the code: only fields that have an effect are read outside this package. The rows
of a NodeProxyConfiguration are in ``node_proxy``.
"""

from __future__ import annotations

import re
from typing import Any, List, Mapping, Optional, Tuple

from .feature_gates import GATES, LATER_GATES, REMOVED_GATES
from .field import AGENT, HONOURED, NOTHING, PARTLY, Field
from .model import DETECT_LOCAL_MODES, KubeProxyConfiguration
from .values import (
    ADDRESS,
    FLAG,
    FLUSH_FREQUENCY,
    HOST_NAME,
    HOST_PORT,
    JOINED_NETWORKS,
    NETWORKS,
    NODE_PORT_ADDRESSES,
    NUMBER,
    PERIOD,
    SCHEDULER,
    TEXT,
    TIMEOUT,
    FieldType,
    choice,
    duration,
    integer,
)

DEFAULT = KubeProxyConfiguration()
_ALL, _IPTABLES, _IPVS, _NFTABLES, _NONE = "all", "iptables", "ipvs", "nftables", "-"
_JSON = "application/json"
_KEEPS = "0 keeps the kernel's"
_KEEPS_IPVS = f"IPVS timeout; {_KEEPS}"
_ACRONYM = re.compile("CIDRs?|ARP")
_CAPITAL = re.compile("(?<=[a-z])(?=[A-Z])")


def _field(
    name: str,
    kind: Optional[FieldType],
    modes: str,
    effect: str,
    text: str,
    *,
    attribute: str = "",
    default: str = "",
    harmless: Tuple[Any, ...] = (),
) -> Field:
    """Return a row.

    ``kind``: its type; None for a field that is not in the model, and for the feature gates. ``attribute``: if it
    differs from the name in snake case. ``default``: for the documentation, if the model's default is not what a user
    gets.
    """
    if kind and not attribute:
        attribute = _CAPITAL.sub("_", _ACRONYM.sub(lambda found: found.group().capitalize(), name)).lower()
    if kind and not default:
        default = kind.documented(value_of(DEFAULT, attribute))
    return Field(name, attribute, default, modes, effect, text, harmless, kind)


def value_of(configuration: KubeProxyConfiguration, attribute: str) -> Any:
    """Return the value of a field by its attribute in the model, with dots."""
    value: Any = configuration
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


FIELDS: Tuple[Field, ...] = (
    _field("mode", TEXT, _NONE, HONOURED, "`iptables`, `ipvs`, `nftables` or `userspace`"),
    _field(
        "featureGates",
        None,
        _ALL,
        PARTLY,
        "see [Feature gates](#feature-gates)",
        attribute="feature_gates",
        default="none",
    ),
    _field(
        "clientConnection.kubeconfig",
        TEXT,
        _ALL,
        AGENT,
        "credentials for the API server, and its address; the node command uses it too",
        default="credentials of the pod",
    ),
    _field(
        "clientConnection.qps",
        NUMBER,
        _ALL,
        NOTHING,
        "the agent sends few requests: a list and a watch of each of four kinds, with network policies of up to eight, "
        "and events",
    ),
    _field("clientConnection.burst", integer(zero_is_unset=True), _ALL, NOTHING, "see `clientConnection.qps`"),
    _field(
        "clientConnection.contentType",
        TEXT,
        _NONE,
        NOTHING,
        "requests are sent with JSON",
        default="protobuf",
        harmless=(_JSON,),
    ),
    _field(
        "clientConnection.acceptContentTypes", TEXT, _NONE, NOTHING, "requests are sent with JSON", harmless=(_JSON,)
    ),
    _field("logging.format", choice("text", "json"), _ALL, AGENT, "`text` or `json`"),
    _field("logging.verbosity", integer(), _ALL, AGENT, "4 and more: also debug lines; smaller numbers have no effect"),
    _field("logging.flushFrequency", FLUSH_FREQUENCY, _NONE, NOTHING, "each line is written at once", harmless=(0.0,)),
    _field("logging.vmodule", None, _NONE, NOTHING, "there are no Go source files to select", default="none"),
    _field("logging.options", None, _NONE, NOTHING, "each line is written at once, to standard error", default="none"),
    _field(
        "hostnameOverride",
        HOST_NAME,
        _ALL,
        HONOURED,
        "name of the Node; surrounding blanks are removed, letters made lower case",
        default="the node's host name",
    ),
    _field(
        "bindAddress",
        ADDRESS,
        _ALL,
        HONOURED,
        "a specific address replaces the node's own address and decides which IP family is primary; no socket is"
        " bound to it",
    ),
    _field(
        "healthzBindAddress",
        HOST_PORT,
        _ALL,
        AGENT,
        "health endpoints; port 10256 if only an address is given",
        default="`0.0.0.0:10256`, or `[::]:10256` with an IPv6 bindAddress",
    ),
    _field(
        "metricsBindAddress",
        HOST_PORT,
        _ALL,
        AGENT,
        "metrics; port 10249 if only an address is given",
        default="`127.0.0.1:10249`, or `[::1]:10249`",
    ),
    _field("bindAddressHardFail", FLAG, _ALL, AGENT, "a health or metrics address that cannot be bound ends the agent"),
    _field("enableProfiling", FLAG, _ALL, NOTHING, "profiling pages exist only in Go programs"),
    _field("showHiddenMetricsForVersion", TEXT, _ALL, NOTHING, "no metric is hidden"),
    _field("iptables.masqueradeBit", integer(0, 31), "iptables, ipvs", HONOURED, "bit of the packet mark, 0 to 31"),
    _field("iptables.masqueradeAll", FLAG, "iptables, ipvs", HONOURED, "masquerade all traffic to cluster IPs"),
    _field(
        "iptables.localhostNodePorts",
        FLAG,
        "iptables, IPv4",
        HONOURED,
        "node ports also answer on 127.0.0.1; off if `nodePortAddresses` does not include loopback",
    ),
    _field(
        "iptables.snatNodeInternalIP",
        None,
        _IPTABLES,
        NOTHING,
        "new in Kubernetes 1.37; the kernel chooses the address used for masquerading",
        default="`false`",
    ),
    _field(
        "iptables.syncPeriod",
        PERIOD,
        _IPTABLES,
        AGENT,
        "time until a failed sync is retried, and half the time after which health fails; greater than 0",
    ),
    _field(
        "iptables.minSyncPeriod",
        duration(zero_is_unset=True),
        _IPTABLES,
        AGENT,
        "minimum time between syncs; at most syncPeriod",
    ),
    _field(
        "ipvs.syncPeriod", PERIOD, _IPVS, AGENT, "as for iptables, and the time between [full checks](#full-checks)"
    ),
    _field("ipvs.minSyncPeriod", TIMEOUT, _IPVS, AGENT, "as for iptables"),
    _field(
        "ipvs.scheduler",
        SCHEDULER,
        _IPVS,
        HONOURED,
        "scheduler of all virtual servers; its kernel module must exist",
        default="`rr`",
    ),
    _field(
        "ipvs.excludeCIDRs",
        NETWORKS,
        _IPVS,
        HONOURED,
        "virtual servers in these ranges belong to other programs and are not touched",
    ),
    _field("ipvs.strictARP", FLAG, _IPVS, HONOURED, "sets arp_ignore to 1 and arp_announce to 2"),
    _field("ipvs.tcpTimeout", TIMEOUT, _IPVS, HONOURED, _KEEPS_IPVS),
    _field("ipvs.tcpFinTimeout", TIMEOUT, _IPVS, HONOURED, _KEEPS_IPVS),
    _field("ipvs.udpTimeout", TIMEOUT, _IPVS, HONOURED, _KEEPS_IPVS),
    _field("nftables.masqueradeBit", integer(0, 31, in_every_mode=False), _NFTABLES, HONOURED, "as for iptables"),
    _field("nftables.masqueradeAll", FLAG, _NFTABLES, HONOURED, "as for iptables"),
    _field("nftables.syncPeriod", PERIOD, _NFTABLES, AGENT, "as for iptables"),
    _field("nftables.minSyncPeriod", duration(zero_is_unset=True), _NFTABLES, AGENT, "as for iptables"),
    _field("winkernel", None, _NONE, NOTHING, "for Windows", default="-"),
    _field(
        "detectLocalMode",
        choice(*DETECT_LOCAL_MODES),
        _ALL,
        HONOURED,
        "how traffic of this node's pods is recognised; see [below](#how-pods-of-this-node-are-recognised)",
    ),
    _field("detectLocal.bridgeInterface", TEXT, _ALL, HONOURED, "required by `BridgeInterface`"),
    _field("detectLocal.interfaceNamePrefix", TEXT, _ALL, HONOURED, "required by `InterfaceNamePrefix`"),
    _field(
        "clusterCIDR",
        JOINED_NETWORKS,
        _ALL,
        HONOURED,
        "ranges of all pods: one CIDR, or one per IP family",
        attribute="cluster_cidrs",
    ),
    _field(
        "nodePortAddresses",
        NODE_PORT_ADDRESSES,
        _ALL,
        HONOURED,
        "CIDRs of the node's addresses on which node ports answer, or the words `primary`, `localhost`, `all`",
        default="all addresses; `primary` in nftables mode",
    ),
    _field(
        "oomScoreAdj",
        integer(-1000, 1000),
        _ALL,
        PARTLY,
        "-1000 to 1000; set by the unit that the role `agent` installs",
    ),
    _field(
        "conntrack.maxPerCore",
        integer(),
        _ALL,
        HONOURED,
        "size of the connection tracking table per core, at most 1048576; 0 keeps the kernel's limit",
    ),
    _field(
        "conntrack.min",
        integer(),
        _ALL,
        HONOURED,
        "minimum size of the table; no effect if maxPerCore is 0 or reaches the limit of 1048576",
    ),
    _field("conntrack.tcpEstablishedTimeout", TIMEOUT, _ALL, HONOURED, _KEEPS),
    _field("conntrack.tcpCloseWaitTimeout", TIMEOUT, _ALL, HONOURED, _KEEPS),
    _field(
        "conntrack.tcpBeLiberal",
        FLAG,
        _ALL,
        HONOURED,
        "`true` sets nf_conntrack_tcp_be_liberal; `false` does not change it",
    ),
    _field("conntrack.udpTimeout", TIMEOUT, _ALL, HONOURED, _KEEPS),
    _field("conntrack.udpStreamTimeout", TIMEOUT, _ALL, HONOURED, _KEEPS),
    _field("configSyncPeriod", PERIOD, _ALL, AGENT, "time between [full checks](#full-checks), at most an hour"),
    _field("portRange", TEXT, _NONE, NOTHING, "kube-proxy does not use it either"),
    _field("windowsRunAsService", None, _NONE, NOTHING, "for Windows", default="-"),
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
            given = value != value_of(DEFAULT, field.attribute) and value not in field.harmless
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
