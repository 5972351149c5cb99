# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Loading of a configuration from a file, text or mappings: a KubeProxyConfiguration and a NodeProxyConfiguration."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

from ..addresses import address_and_port, canonical_address, canonical_network, family_of
from ..cluster.fields import shown
from ..errors import ConfigurationError
from ..mode_names import IPTABLES
from .documents import Documents, check_type, parse_documents
from .effects import without_effect
from .feature_gates import LATER_GATES, REMOVED_GATES, expanded, is_known, locked_problem
from .model import (
    API_VERSION,
    KIND,
    ClientConnection,
    ConntrackConfiguration,
    DetectLocal,
    IPTablesConfiguration,
    IPVSConfiguration,
    KubeProxyConfiguration,
    Logging,
    NFTablesConfiguration,
)
from .node_proxy import KIND as NODE_KIND
from .node_proxy import read_node_proxy
from .reader import Findings, Section, raise_all
from .validate import validate

#: The default ports of healthzBindAddress and metricsBindAddress: kube-proxy's, and those beside a running kube-proxy.
_PORTS = (10256, 10249)
_PORTS_BESIDE_KUBE_PROXY = (10266, 10267)
_LARGE = 2**31 - 1
_NODE_PORT_WORDS: Mapping[str, Tuple[str, ...]] = {
    "all": ("0.0.0.0/0", "::/0"),
    "localhost": ("127.0.0.0/8", "::1/128"),
}
_PREFIX = "KubeProxyConfiguration: "


class LoadedConfiguration(NamedTuple):
    """A valid configuration, and warnings about its source, one line each."""

    configuration: KubeProxyConfiguration
    warnings: Tuple[str, ...]


def load(
    source: Union[str, bytes, Mapping[str, Any]], mode: str = "", node_source: Optional[Mapping[str, Any]] = None
) -> LoadedConfiguration:
    """Read a configuration from the text of a file (YAML or JSON), or from a mapping of its fields.

    ``node_source``: the fields of a NodeProxyConfiguration, which replaces the one in a file. Duplicate fields, fields
    and feature gates that only a later kube-proxy may know, and settings that have no effect here cause warnings. In a
    mapping apiVersion and kind may be absent. A ``mode`` replaces the one in the source. Raises ConfigurationError,
    which names every invalid and every misspelt field.
    """
    warnings: List[str] = []
    if isinstance(source, Mapping):
        documents = Documents({"apiVersion": API_VERSION, "kind": KIND, **source}, {})
    else:
        documents = parse_documents(source, warnings)
    findings, node_findings = Findings(KIND), Findings(NODE_KIND)
    root = Section(documents.kube_proxy, "", findings)
    check_type(documents.kube_proxy, KIND, API_VERSION)
    root.text("apiVersion")
    root.text("kind")
    node_proxy = read_node_proxy(documents.node_proxy if node_source is None else node_source, node_findings)
    configuration = _read(root, mode, _PORTS_BESIDE_KUBE_PROXY if node_proxy.network_policy.standalone else _PORTS)
    root.finish()
    validate(configuration, findings)
    raise_all(findings, node_findings)
    warnings += findings.warnings
    warnings += [f"{_PREFIX}{text}" for text in without_effect(configuration, documents.kube_proxy)]
    warnings += node_findings.warnings
    return LoadedConfiguration(configuration._replace(node_proxy=node_proxy), tuple(warnings))


def load_file(path: str, mode: str = "", node_source: Optional[Mapping[str, Any]] = None) -> LoadedConfiguration:
    """Read the configuration file ``path``; see :func:`load`. Raises ConfigurationError, which names the file."""
    try:
        with open(path, "rb") as stream:
            content = stream.read()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error
    try:
        return load(content, mode, node_source)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def load_given(path: str, mode: str = "") -> LoadedConfiguration:
    """Read the configuration file ``path``, or return the defaults if it is empty.

    A ``mode`` other than ``auto`` takes the place of the configured one. Raises ConfigurationError.
    """
    mode = mode if mode != "auto" else ""
    return load_file(path, mode) if path else load({}, mode)


def _read(root: Section, mode: str, ports: Tuple[int, int]) -> KubeProxyConfiguration:
    bind_address = root.text("bindAddress", "0.0.0.0")
    bind_address = canonical_address(bind_address) or bind_address
    is_v6 = family_of(bind_address) == "IPv6"
    any_address, loopback = ("::", "::1") if is_v6 else ("0.0.0.0", "127.0.0.1")
    root.rest(("winkernel", "windowsRunAsService"))
    own_mode = root.text("mode", IPTABLES)
    return KubeProxyConfiguration(
        mode=mode or own_mode,
        feature_gates=_feature_gates(root),
        client_connection=_client_connection(root.section("clientConnection")),
        logging=_logging(root.section("logging")),
        hostname_override=root.text("hostnameOverride").strip().lower(),
        bind_address=bind_address,
        healthz_bind_address=_with_port(root.text("healthzBindAddress", any_address), ports[0]),
        metrics_bind_address=_with_port(root.text("metricsBindAddress", loopback), ports[1]),
        bind_address_hard_fail=root.flag("bindAddressHardFail", False),
        enable_profiling=root.flag("enableProfiling", False),
        show_hidden_metrics_for_version=root.text("showHiddenMetricsForVersion"),
        iptables=_iptables(root.section("iptables")),
        ipvs=_ipvs(root.section("ipvs")),
        nftables=_nftables(root.section("nftables")),
        detect_local_mode=root.text("detectLocalMode", "ClusterCIDR"),
        detect_local=_detect_local(root.section("detectLocal")),
        cluster_cidrs=_networks(tuple(part.strip() for part in root.text("clusterCIDR").split(",") if part.strip())),
        node_port_addresses=_node_port_addresses(root.strings("nodePortAddresses")),
        oom_score_adj=root.integer("oomScoreAdj", -999, -1000, 1000),
        conntrack=_conntrack(root.section("conntrack")),
        config_sync_period=root.duration("configSyncPeriod", 900.0, 900.0),
        port_range=root.text("portRange"),
    )


def _feature_gates(root: Section) -> Tuple[Tuple[str, bool], ...]:
    gates: Dict[str, bool] = {}
    for name, value in root.items("featureGates"):
        field = f"featureGates.{name}"
        if not isinstance(value, bool):
            root.findings.problem(field, f"{shown(value)} is not true or false")
            continue
        problem = locked_problem(str(name), value)
        if problem:
            root.findings.problem(field, problem)
        elif is_known(str(name)):
            gates[str(name)] = value
        elif name not in LATER_GATES and name not in REMOVED_GATES:
            root.findings.warnings.append(f"{_PREFIX}{field}: has no effect: kube-proxy 1.36 has no such feature gate")
    return tuple(sorted(expanded(gates).items()))


def _client_connection(section: Section) -> ClientConnection:
    default = ClientConnection()
    read = ClientConnection(
        section.text("kubeconfig"),
        section.text("acceptContentTypes"),
        section.text("contentType", default.content_type),
        section.number("qps", default.qps),
        section.integer("burst", default.burst, 0, _LARGE) or default.burst,
    )
    section.finish()
    return read


def _logging(section: Section) -> Logging:
    values = dict(section.rest(("flushFrequency",)))
    flush = values.get("flushFrequency")
    # The logging API accepts an integer number of nanoseconds here as well as a duration.
    seconds = (
        flush / 10**9
        if isinstance(flush, int) and not isinstance(flush, bool)
        else section.duration("flushFrequency", 5.0)
    )
    read = Logging(
        section.text("format", "text"),
        seconds,
        section.integer("verbosity", 0, 0, _LARGE),
        section.rest(("vmodule", "options")),
    )
    section.finish()
    return read


def _iptables(section: Section) -> IPTablesConfiguration:
    read = IPTablesConfiguration(
        section.integer("masqueradeBit", 14, 0, 31),
        section.flag("masqueradeAll", False),
        section.flag("localhostNodePorts", True),
        section.duration("syncPeriod", 30.0, 30.0),
        section.duration("minSyncPeriod", 1.0, 1.0),
    )
    section.rest(("snatNodeInternalIP",))
    section.finish()
    return read


def _ipvs(section: Section) -> IPVSConfiguration:
    read = IPVSConfiguration(
        sync_period=section.duration("syncPeriod", 30.0, 30.0),
        min_sync_period=section.duration("minSyncPeriod", 0.0),
        scheduler=section.text("scheduler"),
        exclude_cidrs=_networks(section.strings("excludeCIDRs")),
        strict_arp=section.flag("strictARP", False),
        tcp_timeout=section.duration("tcpTimeout", 0.0),
        tcp_fin_timeout=section.duration("tcpFinTimeout", 0.0),
        udp_timeout=section.duration("udpTimeout", 0.0),
    )
    section.finish()
    return read


def _nftables(section: Section) -> NFTablesConfiguration:
    read = NFTablesConfiguration(
        # The range is checked in nftables mode only; see validate.
        section.integer("masqueradeBit", 14, -_LARGE, _LARGE),
        section.flag("masqueradeAll", False),
        section.duration("syncPeriod", 30.0, 30.0),
        section.duration("minSyncPeriod", 1.0, 1.0),
    )
    section.finish()
    return read


def _conntrack(section: Section) -> ConntrackConfiguration:
    read = ConntrackConfiguration(
        max_per_core=section.integer("maxPerCore", 32768, 0, _LARGE),
        min=section.integer("min", 131072, 0, _LARGE),
        tcp_established_timeout=section.duration("tcpEstablishedTimeout", 86400.0),
        tcp_close_wait_timeout=section.duration("tcpCloseWaitTimeout", 3600.0),
        tcp_be_liberal=section.flag("tcpBeLiberal", False),
        udp_timeout=section.duration("udpTimeout", 0.0),
        udp_stream_timeout=section.duration("udpStreamTimeout", 0.0),
    )
    section.finish()
    return read


def _detect_local(section: Section) -> DetectLocal:
    read = DetectLocal(section.text("bridgeInterface"), section.text("interfaceNamePrefix"))
    section.finish()
    return read


def _networks(values: Tuple[str, ...]) -> Tuple[str, ...]:
    """Return CIDRs in canonical form; keep other text as it is, for ``validate`` to report."""
    return tuple(canonical_network(value) or value for value in values)


def _node_port_addresses(values: Tuple[str, ...]) -> Tuple[str, ...]:
    """Return CIDRs, with the words ``all`` and ``localhost`` (Kubernetes 1.37) expanded; ``primary`` is kept."""
    return _networks(tuple(cidr for value in values for cidr in _NODE_PORT_WORDS.get(value, (value,))))


def _with_port(address: str, port: int) -> str:
    bare = canonical_address(address)
    return address if bare is None else address_and_port(bare, port)
