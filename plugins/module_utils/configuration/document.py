# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversion of a configuration back to the form of its file, for /configz and for rendered files."""

from __future__ import annotations

from typing import Any, Dict

from .duration import format_duration
from .model import API_VERSION, KIND, KubeProxyConfiguration


def to_mapping(configuration: KubeProxyConfiguration) -> Dict[str, Any]:
    """Return the configuration as a KubeProxyConfiguration v1alpha1 object in JSON types, with all defaults filled in.

    Loading the result gives the same configuration.
    """
    client = configuration.client_connection
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "featureGates": dict(configuration.feature_gates),
        "clientConnection": {
            "kubeconfig": client.kubeconfig,
            "acceptContentTypes": client.accept_content_types,
            "contentType": client.content_type,
            "qps": int(client.qps) if client.qps == int(client.qps) else client.qps,
            "burst": client.burst,
        },
        "logging": {
            "format": configuration.logging.format,
            "flushFrequency": format_duration(configuration.logging.flush_frequency),
            "verbosity": configuration.logging.verbosity,
            **dict(configuration.logging.rest),
        },
        "hostnameOverride": configuration.hostname_override,
        "bindAddress": configuration.bind_address,
        "healthzBindAddress": configuration.healthz_bind_address,
        "metricsBindAddress": configuration.metrics_bind_address,
        "bindAddressHardFail": configuration.bind_address_hard_fail,
        "enableProfiling": configuration.enable_profiling,
        "showHiddenMetricsForVersion": configuration.show_hidden_metrics_for_version,
        "mode": configuration.mode,
        **_mode_blocks(configuration),
        "detectLocalMode": configuration.detect_local_mode,
        "detectLocal": {
            "bridgeInterface": configuration.detect_local.bridge_interface,
            "interfaceNamePrefix": configuration.detect_local.interface_name_prefix,
        },
        "clusterCIDR": ",".join(configuration.cluster_cidrs),
        "nodePortAddresses": list(configuration.effective_node_port_addresses),
        "oomScoreAdj": configuration.oom_score_adj,
        "conntrack": _conntrack(configuration),
        "configSyncPeriod": format_duration(configuration.config_sync_period),
        "portRange": configuration.port_range,
    }


def _mode_blocks(configuration: KubeProxyConfiguration) -> Dict[str, Any]:
    iptables, ipvs, nftables = configuration.iptables, configuration.ipvs, configuration.nftables
    return {
        "iptables": {
            "masqueradeBit": iptables.masquerade_bit,
            "masqueradeAll": iptables.masquerade_all,
            "localhostNodePorts": iptables.localhost_node_ports,
            "syncPeriod": format_duration(iptables.sync_period),
            "minSyncPeriod": format_duration(iptables.min_sync_period),
        },
        "ipvs": {
            "syncPeriod": format_duration(ipvs.sync_period),
            "minSyncPeriod": format_duration(ipvs.min_sync_period),
            "scheduler": ipvs.scheduler,
            "excludeCIDRs": list(ipvs.exclude_cidrs),
            "strictARP": ipvs.strict_arp,
            "tcpTimeout": format_duration(ipvs.tcp_timeout),
            "tcpFinTimeout": format_duration(ipvs.tcp_fin_timeout),
            "udpTimeout": format_duration(ipvs.udp_timeout),
        },
        "nftables": {
            "masqueradeBit": nftables.masquerade_bit,
            "masqueradeAll": nftables.masquerade_all,
            "syncPeriod": format_duration(nftables.sync_period),
            "minSyncPeriod": format_duration(nftables.min_sync_period),
        },
    }


def _conntrack(configuration: KubeProxyConfiguration) -> Dict[str, Any]:
    conntrack = configuration.conntrack
    return {
        "maxPerCore": conntrack.max_per_core,
        "min": conntrack.min,
        "tcpEstablishedTimeout": format_duration(conntrack.tcp_established_timeout),
        "tcpCloseWaitTimeout": format_duration(conntrack.tcp_close_wait_timeout),
        "tcpBeLiberal": conntrack.tcp_be_liberal,
        "udpTimeout": format_duration(conntrack.udp_timeout),
        "udpStreamTimeout": format_duration(conntrack.udp_stream_timeout),
    }
