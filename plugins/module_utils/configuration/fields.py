# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fields of the configuration file: one row for each field of a KubeProxyConfiguration and NodeProxyConfiguration.

Reading, validation, writing, warnings and the documentation follow from the rows; types and defaults are those of the
models. A test compares the rows with the code: only fields that have an effect are read outside this package.
"""

from __future__ import annotations

from ..base.mode_names import IPTABLES, IPVS, NFTABLES, USERSPACE
from . import values
from .behaviour import BEHAVIOURS, KUBE_PROXY_RELEASE
from .field import NO_MODE, PARTLY, Field, agent_only, honoured, unused
from .model import DETECT_LOCAL_MODES
from .node_proxy import ALLOW, AUTO, CUT, DENY, KEEP, MOST_CHECKS

_JSON = "application/json"
_KEEPS = "0 keeps the kernel's"
_KEEPS_IPVS = f"IPVS timeout; {_KEEPS}"
_MOST_FORWARDED = 1 << 20
_MOST_METRICS = 10_000

FIELDS: tuple[Field, ...] = (
    honoured("mode", values.TEXT, "[`iptables`, `ipvs`, `nftables`, `userspace` or `auto`](modes.md)", modes=NO_MODE),
    honoured(
        "featureGates",
        None,
        "see [Feature gates](#feature-gates)",
        attribute="feature_gates",
        default="none",
        effect=PARTLY,
    ),
    agent_only(
        "clientConnection.kubeconfig",
        values.TEXT,
        "credentials for the API server, and its address; the node command uses it too",
        default="credentials of the pod",
    ),
    unused(
        "clientConnection.qps",
        values.NUMBER,
        "the agent sends few requests: a list and a watch of each of four kinds, with network policies of up to eight, "
        "and events",
    ),
    unused("clientConnection.burst", values.integer(zero_is_unset=True), "see `clientConnection.qps`"),
    unused(
        "clientConnection.contentType",
        values.TEXT,
        "requests are sent with JSON",
        default="protobuf",
        harmless=(_JSON,),
    ),
    unused("clientConnection.acceptContentTypes", values.TEXT, "requests are sent with JSON", harmless=(_JSON,)),
    agent_only("logging.format", values.choice("text", "json"), "`text` or `json`"),
    agent_only("logging.verbosity", values.integer(), "4 and more: also debug lines; smaller numbers have no effect"),
    unused("logging.flushFrequency", values.FLUSH_FREQUENCY, "each line is written at once", harmless=(0.0,)),
    unused("logging.vmodule", None, "there are no Go source files to select", default="none"),
    unused("logging.options", None, "each line is written at once, to standard error", default="none"),
    honoured(
        "hostnameOverride",
        values.HOST_NAME,
        "name of the Node; surrounding blanks are removed, letters made lower case",
        default="the node's host name",
    ),
    honoured(
        "bindAddress",
        values.ADDRESS,
        "a specific address replaces the node's own address and decides which IP family is primary; no socket is"
        " bound to it",
    ),
    agent_only(
        "healthzBindAddress",
        values.HOST_PORT,
        "health endpoints; port 10256 if only an address is given",
        default="`0.0.0.0:10256`, or `[::]:10256` with an IPv6 bindAddress",
    ),
    agent_only(
        "metricsBindAddress",
        values.HOST_PORT,
        "metrics; port 10249 if only an address is given",
        default="`127.0.0.1:10249`, or `[::1]:10249`",
    ),
    agent_only("bindAddressHardFail", values.FLAG, "a health or metrics address that cannot be bound ends the agent"),
    unused("enableProfiling", values.FLAG, "profiling pages exist only in Go programs"),
    unused("showHiddenMetricsForVersion", values.TEXT, "no metric is hidden"),
    honoured(
        "iptables.masqueradeBit", values.integer(0, 31), "bit of the packet mark, 0 to 31", modes="iptables, ipvs"
    ),
    honoured("iptables.masqueradeAll", values.FLAG, "masquerade all traffic to cluster IPs", modes="iptables, ipvs"),
    honoured(
        "iptables.localhostNodePorts",
        values.FLAG,
        "node ports also answer on 127.0.0.1; off if `nodePortAddresses` does not include loopback",
        modes="iptables, IPv4",
    ),
    unused(
        "iptables.snatNodeInternalIP",
        None,
        "new in Kubernetes 1.37; the kernel chooses the address used for masquerading",
        default="`false`",
    ),
    agent_only(
        "iptables.syncPeriod",
        values.PERIOD,
        "time until a failed sync is retried, and half the time after which health fails; greater than 0",
        modes=IPTABLES,
    ),
    agent_only(
        "iptables.minSyncPeriod",
        values.MINIMUM_PERIOD,
        "minimum time between syncs; at most syncPeriod",
        modes=IPTABLES,
    ),
    agent_only(
        "ipvs.syncPeriod",
        values.PERIOD,
        "as for iptables, and the time between [full checks](#full-checks)",
        modes=IPVS,
    ),
    agent_only("ipvs.minSyncPeriod", values.TIMEOUT, "as for iptables", modes=IPVS),
    honoured(
        "ipvs.scheduler",
        values.SCHEDULER,
        "scheduler of all virtual servers; its kernel module must exist",
        modes=IPVS,
        default="`rr`",
    ),
    honoured(
        "ipvs.excludeCIDRs",
        values.NETWORKS,
        "virtual servers in these ranges belong to other programs and are not touched",
        modes=IPVS,
    ),
    honoured("ipvs.strictARP", values.FLAG, "sets arp_ignore to 1 and arp_announce to 2", modes=IPVS),
    honoured("ipvs.tcpTimeout", values.TIMEOUT, _KEEPS_IPVS, modes=IPVS),
    honoured("ipvs.tcpFinTimeout", values.TIMEOUT, _KEEPS_IPVS, modes=IPVS),
    honoured("ipvs.udpTimeout", values.TIMEOUT, _KEEPS_IPVS, modes=IPVS),
    honoured("nftables.masqueradeBit", values.integer(0, 31, in_every_mode=False), "as for iptables", modes=NFTABLES),
    honoured("nftables.masqueradeAll", values.FLAG, "as for iptables", modes=NFTABLES),
    agent_only("nftables.syncPeriod", values.PERIOD, "as for iptables", modes=NFTABLES),
    agent_only("nftables.minSyncPeriod", values.MINIMUM_PERIOD, "as for iptables", modes=NFTABLES),
    unused("winkernel", None, "for Windows"),
    honoured(
        "detectLocalMode",
        values.choice(*DETECT_LOCAL_MODES),
        "how traffic of this node's pods is recognised; see [below](#how-pods-of-this-node-are-recognised)",
    ),
    honoured("detectLocal.bridgeInterface", values.TEXT, "required by `BridgeInterface`"),
    honoured("detectLocal.interfaceNamePrefix", values.TEXT, "required by `InterfaceNamePrefix`"),
    honoured(
        "clusterCIDR",
        values.JOINED_NETWORKS,
        "ranges of all pods: one CIDR, or one per IP family",
        attribute="cluster_cidrs",
    ),
    honoured(
        "nodePortAddresses",
        values.NODE_PORT_ADDRESSES,
        "CIDRs of the node's addresses on which node ports answer, or the words `primary`, `localhost`, `all`",
        default="all addresses; `primary` in nftables mode",
    ),
    honoured(
        "oomScoreAdj",
        values.integer(-1000, 1000),
        "-1000 to 1000; set by the unit that the role `agent` installs",
        effect=PARTLY,
    ),
    honoured(
        "conntrack.maxPerCore",
        values.integer(),
        "size of the connection tracking table per core, at most 1048576; a larger table, and with 0 any, is kept",
    ),
    honoured(
        "conntrack.min",
        values.integer(),
        "minimum size of the table; no effect if maxPerCore is 0 or reaches the limit of 1048576",
    ),
    honoured("conntrack.tcpEstablishedTimeout", values.TIMEOUT, _KEEPS),
    honoured("conntrack.tcpCloseWaitTimeout", values.TIMEOUT, _KEEPS),
    honoured(
        "conntrack.tcpBeLiberal", values.FLAG, "`true` sets nf_conntrack_tcp_be_liberal; `false` does not change it"
    ),
    honoured("conntrack.udpTimeout", values.TIMEOUT, _KEEPS),
    honoured("conntrack.udpStreamTimeout", values.TIMEOUT, _KEEPS),
    agent_only("configSyncPeriod", values.PERIOD, "time between [full checks](#full-checks), at most an hour"),
    unused("portRange", values.TEXT, "kube-proxy does not use it either"),
    unused("windowsRunAsService", None, "for Windows"),
)

NODE_FIELDS: tuple[Field, ...] = (
    honoured(
        "behaviour",
        values.choice(*BEHAVIOURS),
        f"`kube-proxy`, that of release {KUBE_PROXY_RELEASE}, or `corrected` to correct its known defects: see"
        " [conformance.md](conformance.md)",
        attribute="behaviour.name",
    ),
    honoured(
        "nodePortRange",
        values.PORT_RANGE,
        "the cluster's range of node ports, from which corrected behaviour takes no source port for masquerading",
        attribute="behaviour.node_ports",
    ),
    honoured(
        "endConnectionsOfDeletedServices",
        values.FLAG,
        "with corrected behaviour, connection tracking entries of TCP connections through deleted Services are deleted"
        " as well, not only those of UDP and SCTP",
        attribute="behaviour.end_deleted",
    ),
    honoured(
        "servicePolicy.annotations",
        values.FLAG,
        "whether the annotations of [Service policy](service-policy.md) apply",
        attribute="service_policy.annotations_enabled",
    ),
    honoured(
        "servicePolicy.namespaces",
        values.NAMESPACES,
        "only annotations in these namespaces apply",
        attribute="service_policy.annotated_namespaces",
        default="all",
    ),
    honoured("servicePolicy.aliases", values.FLAG, "equivalent annotations of kube-router and Cilium apply, too"),
    honoured(
        "servicePolicy.nodeWeights",
        values.FLAG,
        "the annotation `kubenode.proxy/weight` of Nodes applies; the agent then watches all Nodes",
    ),
    honoured(
        "servicePolicy.nodePortSources",
        values.CIDRS,
        "CIDRs whose sources may use the node ports of this node; if all are of one family, node ports of the other"
        " family are closed",
        default="all",
    ),
    honoured(
        "servicePolicy.localServices",
        values.SERVICES,
        "Services, as `namespace/name`, that are left to [programs on the node](service-policy.md#node-local-programs)",
    ),
    honoured(
        "servicePolicy.externalRanges",
        values.CIDRS,
        "CIDRs to which external IPs and load balancer addresses of Services of the cluster are"
        " [limited](security.md#external-addresses); if all are of one family, those of the other are refused",
        default="all",
    ),
    honoured(
        "servicePolicy.removedEndpoints",
        values.REMOVED_ENDPOINTS,
        "`keep`, `reset` or `reset-after=30s`: what becomes of TCP connections to [removed"
        " endpoints](service-policy.md#removed-endpoints) of Services without the annotation; only the agent waits",
    ),
    honoured(
        "staticServices.directory",
        values.ABSOLUTE_PATH,
        "absolute path of the manifests of [static Services](static-services.md); it need not exist",
    ),
    agent_only(
        "healthChecks.namespaces",
        values.NAMESPACES,
        "namespaces of the cluster whose Services may request [health checks](static-services.md#health-checks) by "
        "annotations; static Services always may",
    ),
    agent_only(
        "healthChecks.maximum",
        values.integer(0, MOST_CHECKS),
        f"number of endpoints that are checked, 0 to {MOST_CHECKS}; the others are served unchecked, with a warning",
        attribute="health_checks.most_endpoints",
    ),
    agent_only(
        "healthChecks.panicPercent",
        values.integer(0, 100),
        "if at most this percentage of the ready endpoints of a port passes, all of them are served, 0 to 100",
    ),
    agent_only(
        "apiServers.servers",
        values.API_SERVERS,
        "API servers of the same cluster, as `ADDRESS`, `NAME` or `ADDRESS:PORT` (6443), for when [that of the "
        "kubeconfig fails](agent.md#several-api-servers)",
        attribute="api_servers.alternatives",
    ),
    agent_only(
        "apiServers.discover",
        values.FLAG,
        "also use the API servers that the cluster names in the EndpointSlice `default/kubernetes`",
    ),
    honoured(
        "outsideHost.enabled",
        values.FLAG,
        "the [host is outside the cluster](hosts-outside-the-cluster.md): it has no Node, and serves cluster IPs only",
    ),
    honoured(
        "outsideHost.namespaces", values.NAMESPACES, "namespaces whose Services such a host serves", default="all"
    ),
    honoured(
        "outsideHost.labelled",
        values.FLAG,
        "such a host serves, besides those namespaces, only Services with the label `kubenode.proxy/outside-hosts: "
        '"true"`',
    ),
    honoured(
        "ipvsFilterBackend",
        values.choice(AUTO, IPTABLES, NFTABLES),
        "what masquerades and filters connections beside IPVS: `iptables` with ipsets, `nftables`, or `auto`, which"
        " keeps the one in use, otherwise selects nftables if supported, otherwise iptables; see"
        " [modes.md](modes.md#ipvs-without-iptables)",
        modes=IPVS,
    ),
    agent_only(
        "userspace.maxConnections",
        values.integer(8, _MOST_FORWARDED),
        "TCP connections at a time, from 8; lower if the limit of open files allows fewer",
        modes=USERSPACE,
    ),
    agent_only(
        "userspace.maxSessions",
        values.integer(8, _MOST_FORWARDED),
        "UDP sessions at a time, from 8; lower if the limit of open files allows fewer",
        modes=USERSPACE,
    ),
    agent_only(
        "userspace.connectTimeout",
        values.duration_between(0.1, 30),
        "how long one endpoint may take to accept a connection before another one is tried",
        modes=USERSPACE,
    ),
    agent_only(
        "userspace.drainTimeout",
        values.duration_between(0, 20),
        "how long open connections may continue when the agent is stopped, at most 20s",
        modes=USERSPACE,
    ),
    honoured("networkPolicy.enabled", values.FLAG, "enforce NetworkPolicies for the pods of this node"),
    honoured(
        "networkPolicy.standalone",
        values.FLAG,
        "do not serve Services on this node, because kube-proxy or another program does",
    ),
    honoured(
        "networkPolicy.clusterNetworkPolicies",
        values.FLAG,
        "enforce ClusterNetworkPolicies (`policy.networking.k8s.io`) too",
        attribute="network_policy.cluster_policies",
    ),
    honoured(
        "networkPolicy.establishedConnections",
        values.choice(KEEP, CUT),
        "`keep` or `cut` connections that a change of policies, labels or pods no longer allows",
    ),
    honoured(
        "networkPolicy.logDenied",
        values.FLAG,
        "send the beginning of at most 10 denied packets a second to an NFLOG group, which the agent writes to its log",
    ),
    honoured("networkPolicy.logGroup", values.integer(0, 65535), "that NFLOG group"),
    honoured(
        "networkPolicy.unknownPods",
        values.choice(ALLOW, DENY),
        "`allow` or `deny` traffic of addresses in the node's pod ranges that belong to no known pod",
    ),
    honoured("networkPolicy.podCIDRs", values.CIDRS, "these pod ranges", default="`spec.podCIDRs` of the Node"),
    honoured(
        "networkPolicy.egressExemptCIDRs",
        values.CIDRS,
        "let pods connect to these CIDRs, for example to a DNS cache on the node, whatever egress rules allow",
    ),
    honoured(
        "networkPolicy.checkSources",
        values.FLAG,
        "drop packets of pods whose source is not theirs, and those from elsewhere with addresses of pods of the node",
    ),
    honoured(
        "networkPolicy.exemptSources",
        values.CIDRS,
        "let pods send from these CIDRs although they are not theirs, for example from the clients of a VPN",
    ),
    honoured(
        "networkPolicy.exemptSourceNamespaces",
        values.NAMESPACES,
        "only pods of these namespaces may do so",
        default="all",
    ),
    honoured(
        "traffic.countConnections",
        values.FLAG,
        "in nftables mode, count the connections of each [Service and endpoint](traffic.md); the other modes always do",
        modes=NFTABLES,
    ),
    honoured(
        "traffic.countBytes",
        values.FLAG,
        "count the [packets and bytes](traffic.md#packets-and-bytes-in-nftables-mode) of each Service; ipvs mode "
        "counts them anyway, the other modes cannot",
        modes=NFTABLES,
    ),
    agent_only(
        "traffic.metricsPorts",
        values.integer(0, _MOST_METRICS),
        "of how many ports of Services there are [metrics](traffic.md#metrics), for each IP family,"
        f" 0 to {_MOST_METRICS}: of those with the most new connections",
    ),
    agent_only(
        "traffic.metricsNamespaces", values.NAMESPACES, "namespaces whose Services have these metrics", default="all"
    ),
)
