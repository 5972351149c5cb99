# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the settings of the dataplane, which follow from a configuration and a node."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import Node
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import KUBE_PROXY
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.consistency import check_consistency
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import (
    ConntrackConfiguration,
    KubeProxyConfiguration,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import (
    OutsideHost,
    ServicePolicySettings,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.build_settings import (
    dataplane_settings,
    local_traffic,
    node_context,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import LocalTraffic

NODE = Node("node-a", ("172.18.0.2", "fd00::2"), (), ("10.244.1.0/24", "fd00:10:1::/80"), "zone-a")
INTERFACES = (("lo", "127.0.0.1"), ("eth0", "172.18.0.2"), ("eth1", "192.0.2.9"), ("lo", "::1"), ("eth0", "fd00::2"))


def configured(**fields):
    return load(fields).configuration


def settings(family=IPV4, node=NODE, facts=None, **fields):
    return dataplane_settings(
        configured(**fields), family, node_name="node-a", node=node, node_addresses=INTERFACES, **(facts or {})
    )


def cidr(value):
    return LocalTraffic("cidr", value)


@pytest.mark.parametrize(
    ("fields", "v4", "v6"),
    [
        ({"clusterCIDR": "10.244.0.0/16"}, cidr("10.244.0.0/16"), None),
        ({"clusterCIDR": "10.244.0.0/16,fd00:10::/64"}, cidr("10.244.0.0/16"), cidr("fd00:10::/64")),
        ({"clusterCIDR": "fd00:10::/64,10.244.0.0/16"}, cidr("10.244.0.0/16"), cidr("fd00:10::/64")),
        ({}, None, None),
        ({"detectLocalMode": "NodeCIDR", "clusterCIDR": "10.0.0.0/8"}, cidr("10.244.1.0/24"), cidr("fd00:10:1::/80")),
        (
            {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cni0"}},
            LocalTraffic("bridge", "cni0"),
            LocalTraffic("bridge", "cni0"),
        ),
        (
            {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "cali"}},
            LocalTraffic("prefix", "cali"),
            LocalTraffic("prefix", "cali"),
        ),
    ],
)
def test_local_traffic(fields, v4, v6):
    configuration = configured(**fields)
    assert local_traffic(configuration, IPV4, NODE.pod_cidrs) == v4
    assert local_traffic(configuration, IPV6, NODE.pod_cidrs) == v6


def test_node_cidr_without_pod_cidrs():
    assert local_traffic(configured(detectLocalMode="NodeCIDR"), IPV4, ()) is None
    assert settings(node=None, detectLocalMode="NodeCIDR").local_traffic is None


def test_settings_of_a_family():
    found = settings(
        facts={"service_cidrs": ("10.96.0.0/16", "fd00:96::/112"), "nfacct_counters": ["a"], "conntrack_liberal": True},
        mode="ipvs",
        ipvs={"scheduler": "sh", "excludeCIDRs": ["10.9.0.0/16", "fd00:9::/64"]},
        iptables={"masqueradeAll": True, "masqueradeBit": 15},
    )
    assert (found.family, found.node_name, found.node_ip) == (IPV4, "node-a", "172.18.0.2")
    assert (found.masquerade_mark, found.masquerade_all) == (0x8000, True)
    assert (found.scheduler, found.exclude_cidrs) == ("sh", ("10.9.0.0/16",))
    assert found.service_cidrs == ("10.96.0.0/16",)
    assert found.node_port_cidrs == () and found.node_port_addresses == ("127.0.0.1", "172.18.0.2", "192.0.2.9")
    assert found.node_addresses == INTERFACES[:3]
    assert found.conntrack_liberal and found.random_fully and found.nfacct_counters == ("a",)
    assert not found.localhost_node_ports and settings().localhost_node_ports, "in iptables mode only"
    v6 = settings(IPV6, mode="ipvs", ipvs={"excludeCIDRs": ["10.9.0.0/16", "fd00:9::/64"]})
    assert (v6.node_ip, v6.exclude_cidrs, v6.node_port_addresses) == ("fd00::2", ("fd00:9::/64",), ("::1", "fd00::2"))
    assert not v6.localhost_node_ports


@pytest.mark.parametrize(
    ("values", "cidrs", "addresses", "localhost"),
    [
        (["172.18.0.0/16"], ("172.18.0.0/16",), ("172.18.0.2",), False),
        (["172.18.0.0/16", "127.0.0.0/8"], ("172.18.0.0/16", "127.0.0.0/8"), ("127.0.0.1", "172.18.0.2"), True),
        (["0.0.0.0/0"], (), ("127.0.0.1", "172.18.0.2", "192.0.2.9"), True),
        (["fd00::/8"], (), ("127.0.0.1", "172.18.0.2", "192.0.2.9"), True),
        (["primary"], ("172.18.0.2/32",), ("172.18.0.2",), False),
        (["primary", "localhost"], ("172.18.0.2/32", "127.0.0.0/8"), ("127.0.0.1", "172.18.0.2"), True),
        (["192.0.2.0/24", "primary"], ("192.0.2.0/24", "172.18.0.2/32"), ("172.18.0.2", "192.0.2.9"), False),
        (["localhost", "all"], (), ("127.0.0.1", "172.18.0.2", "192.0.2.9"), True),
        # kube-proxy refuses a word that is repeated.
        (["localhost", "localhost"], ("127.0.0.0/8",), ("127.0.0.1",), True),
    ],
)
def test_node_port_addresses(values, cidrs, addresses, localhost):
    found = settings(nodePortAddresses=values)
    assert (found.node_port_cidrs, found.node_port_addresses, found.localhost_node_ports) == (
        cidrs,
        addresses,
        localhost,
    )
    assert not settings(nodePortAddresses=values, iptables={"localhostNodePorts": False}).localhost_node_ports


@pytest.mark.parametrize("mode", ["iptables", "ipvs", "nftables"])
def test_localhost_beside_primary_closes_a_family_without_an_address_of_the_node(mode):
    only_v4 = NODE._replace(internal_ips=("172.18.0.2",))
    alone, both = (
        settings(IPV6, only_v4, mode=mode, nodePortAddresses=words) for words in (["primary"], ["primary", "localhost"])
    )
    assert alone.node_port_cidrs == () and both.node_port_cidrs == ("::1/128",)
    assert "fd00::2" in alone.node_port_addresses and "fd00::2" not in both.node_port_addresses


ALL, ALL_BUT_TCP = ("tcp", "udp", "sctp"), ("udp", "sctp")
OFF = {"KubeProxyNFTablesLocalhostNodePorts": False}


# KEP-6032, and Kubernetes pull request 142129 for what names a loopback address.
@pytest.mark.parametrize(
    ("fields", "v4", "v6"),
    [
        ({}, ALL, ALL),
        ({"nodePortAddresses": ["all"]}, ALL, ALL),
        ({"nodePortAddresses": ["64.0.0.0/2", "::/1"]}, ALL, ALL),
        ({"nodePortAddresses": ["primary", "localhost"]}, ALL_BUT_TCP, ALL_BUT_TCP),
        ({"nodePortAddresses": ["0.0.0.0/0", "127.0.0.1/32"]}, ALL_BUT_TCP, ALL),
        ({"nodePortAddresses": ["::1/128"]}, ALL, ALL_BUT_TCP),
        ({"nodePortAddresses": ["127.0.0.2/32"]}, ALL_BUT_TCP, ALL),
        ({"nodePortAddresses": ["localhost"], "featureGates": OFF}, (), ()),
        ({"featureGates": OFF}, (), ()),
        ({"mode": "iptables", "nodePortAddresses": ["localhost"]}, (), ()),
        ({"mode": "ipvs"}, (), ()),
        ({"mode": "ipvs", "nodePortAddresses": ["localhost"]}, (), ()),
    ],
)
def test_node_ports_refused_at_loopback_addresses(fields, v4, v6):
    for family, expected in ((IPV4, v4), (IPV6, v6)):
        found = settings(family, **{"mode": "nftables", **fields})
        assert found.localhost_rejected == expected
        assert found.localhost_listeners is (expected == ALL_BUT_TCP)


def test_nftables_mode_uses_only_the_primary_address():
    assert settings(mode="nftables").node_port_addresses == ("172.18.0.2",)
    assert settings(mode="nftables", node=None).node_port_cidrs == ()
    bound = settings(mode="nftables", node=None, bindAddress="192.0.2.9")
    assert (bound.node_ip, bound.node_port_addresses) == ("192.0.2.9", ("192.0.2.9",))


def test_node_context():
    rest = (KUBE_PROXY, ServicePolicySettings(), OutsideHost())
    assert node_context(configured(), IPV4, "node-a", NODE) == (IPV4, "node-a", "zone-a", True, *rest)
    off = configured(featureGates={"AllowServiceExternalIPs": False})
    assert node_context(off, IPV6, "node-a", None) == (IPV6, "node-a", "", False, *rest)


DUAL, ONLY_V4 = (IPV4, IPV6), (IPV4,)
QUIET = {"nodePortAddresses": ["primary"]}


@pytest.mark.parametrize(
    ("fields", "families", "expected"),
    [
        (QUIET, DUAL, []),
        ({}, DUAL, ["nodePortAddresses: is not set"]),
        ({"mode": "nftables"}, DUAL, []),
        ({"nodePortAddresses": ["fd00::/8"]}, DUAL, ["nodePortAddresses: has no CIDR of the primary IP family IPv4"]),
        (
            {"nodePortAddresses": ["10.0.0.0/8"], "clusterCIDR": "10.0.0.0/8,fd00::/8"},
            DUAL,
            ["nodePortAddresses: is of one IP family"],
        ),
        ({**QUIET, "clusterCIDR": "fd00::/8"}, DUAL, ["clusterCIDR: fd00::/8 has no CIDR of the primary"]),
        (
            {**QUIET, "clusterCIDR": "fd00::/8", "detectLocalMode": "NodeCIDR"},
            ONLY_V4,
            ["clusterCIDR: ", "spec.podCIDRs of the Node: is empty"],
        ),
        (
            {
                **QUIET,
                "mode": "ipvs",
                "ipvs": {"excludeCIDRs": ["fd00::/8", "fd01::/16"]},
                "healthzBindAddress": "fd00::1",
            },
            ONLY_V4,
            [
                "ipvs.excludeCIDRs: fd00::/8, fd01::/16 is not",
                "healthzBindAddress: [fd00::1]:10256 is not of this node's only",
            ],
        ),
        ({**QUIET, "mode": "ipvs", "ipvs": {"excludeCIDRs": ["fd00::/8", "10.0.0.0/8"]}}, ONLY_V4, []),
        ({**QUIET, "healthzBindAddress": "::", "metricsBindAddress": "[::]:10249"}, ONLY_V4, []),
        ({**QUIET, "detectLocalMode": "NodeCIDR"}, DUAL, ["spec.podCIDRs of the Node: is empty"]),
        ({**QUIET, "metricsBindAddress": "::1"}, ONLY_V4, ["metricsBindAddress: [::1]:10249"]),
    ],
)
def test_consistency_warnings(fields, families, expected):
    warnings = check_consistency(configured(**fields), IPV4, families)
    assert len(warnings) == len(expected)
    assert all(text.startswith(start) for text, start in zip(warnings, expected)), warnings


def test_open_node_ports_cause_no_warning_without_a_node_port_service():
    assert check_consistency(configured(), IPV4, DUAL, has_node_ports=False) == ()
    assert check_consistency(configured(), IPV4, DUAL, has_node_ports=True) != ()


def test_consistency_errors():
    with pytest.raises(ConfigurationError, match="IPv6 is not supported by this node"):
        check_consistency(KubeProxyConfiguration(), IPV6, ONLY_V4)
    with pytest.raises(ConfigurationError, match="clusterCIDR: fd00::/8 has no CIDR of the primary IP family IPv4"):
        check_consistency(configured(clusterCIDR="fd00::/8"), IPV4, ONLY_V4)
    for families in (ONLY_V4, DUAL):
        with pytest.raises(ConfigurationError, match="podCIDRs of the Node: fd00::/64 has no CIDR of the primary"):
            check_consistency(configured(detectLocalMode="NodeCIDR"), IPV4, families, ["fd00::/64"])


@pytest.mark.parametrize(
    ("per_core", "minimum", "cores", "expected"),
    [
        (67890, 0, 4, 271560),
        (67890, 0, 64, 1048576),
        (67890, 2000000, 64, 1048576),
        (1, 123456, 4, 123456),
        (1, 2000000, 4, 2000000),
        (0, 123456, 4, None),
        (32768, 0, 8, 262144),
    ],
)
def test_size_of_the_connection_table(per_core, minimum, cores, expected):
    assert ConntrackConfiguration(per_core, minimum).maximum(cores) == expected
