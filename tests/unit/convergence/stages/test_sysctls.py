# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One configuration gives one set of kernel parameters: in the module sysctls at boot, and in a starting agent."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4
from ansible_collections.kubenode.proxy.plugins.module_utils.base.mode_names import MODES_IN_EFFECT
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import Node
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages import sysctls as stages
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages.sysctls import (
    tracks_liberally,
    wanted_sysctls,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.render import render
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.sysctls import profile_of
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.facts import node_facts
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters.sysctl_profile import wanted_values
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters.sysctls import unchangeable
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support import complete
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.build_settings import dataplane_settings

# The module needs Ansible, which the environments of the oldest and newest Python lack.
pytest.importorskip("ansible")
from ansible_collections.kubenode.proxy.plugins.modules import sysctls

LEFT_ALONE = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
MAXIMUM = "net.netfilter.nf_conntrack_max"
LOCALNET = "net.ipv4.conf.all.route_localnet"
ARP = "net.ipv4.conf.all.arp_ignore"
NODE = Node("node-1", ("172.18.0.2", "fd00::2"), (), ())
OPTIONS = {
    **dict.fromkeys(("mode", "strict_arp", "route_localnet", "estimation", "conntrack", "reserved_node_ports")),
    **dict.fromkeys(("netdev_max_backlog", "configuration")),
    "bridge_netfilter": False,
}


def at_boot(configuration, **options):
    """Return the module's parameters for a configuration on this machine."""
    return wanted_values(profile_of({**OPTIONS, "configuration": configuration, **options}, node_facts().cores))


@pytest.mark.parametrize("mode", MODES_IN_EFFECT)
@pytest.mark.parametrize("of_configuration", [None, "ipvs", "auto"])
def test_every_mode_that_the_module_lists_is_one_that_it_takes(mode, of_configuration):
    """Also that of network policies only, which no KubeProxyConfiguration has; it leaves the parameters to others."""
    found = at_boot({"mode": of_configuration} if of_configuration else None, mode=mode)
    assert (found == {}) == (mode in ("none", "userspace")), found
    assert (LOCALNET in found) == (mode == "iptables")


def rendered_settings(configuration, node):
    """Return the settings from which a convergence derives rules and kernel parameters."""
    return dataplane_settings(configuration, IPV4, node_name="node-1", node=node, node_addresses=())


@pytest.mark.parametrize(
    ("configuration", "there", "absent"),
    [
        ({}, {MAXIMUM, LOCALNET}, {ARP}),
        ({"conntrack": {"maxPerCore": 0}}, {LOCALNET}, {MAXIMUM}),
        (
            {"conntrack": LEFT_ALONE},
            {LOCALNET},
            {MAXIMUM},
        ),
        ({"conntrack": {"min": 500_000, "udpTimeout": "1m30s", "tcpBeLiberal": True}}, {MAXIMUM}, set()),
        ({"iptables": {"localhostNodePorts": False}}, {MAXIMUM}, {LOCALNET}),
        ({"nodePortAddresses": ["192.0.2.0/24"]}, {MAXIMUM}, {LOCALNET}),
        ({"nodePortAddresses": ["127.0.0.0/8", "192.0.2.0/24"]}, {LOCALNET}, set()),
        ({"nodePortAddresses": ["primary"]}, set(), {LOCALNET}),
        ({"nodePortAddresses": ["primary", "fd00::/8"]}, set(), {LOCALNET}),
        ({"nodePortAddresses": ["primary", "127.0.0.0/8"]}, {LOCALNET}, set()),
        ({"nodePortAddresses": ["primary"], "bindAddress": "192.0.2.7"}, set(), {LOCALNET}),
        ({"nodePortAddresses": ["primary"], "bindAddress": "127.0.0.1"}, {LOCALNET}, set()),
        ({"nodePortAddresses": ["::1/128"]}, {LOCALNET}, set()),
        ({"mode": "ipvs", "ipvs": {"strictARP": True}}, {ARP}, {LOCALNET}),
        ({"mode": "ipvs"}, set(), {ARP, LOCALNET}),
        ({"mode": "nftables"}, {MAXIMUM}, {LOCALNET, ARP}),
    ],
)
def test_boot_and_agent_agree(configuration, there, absent):
    loaded = load(configuration).configuration
    found = at_boot(configuration)
    assert found == wanted_sysctls(loaded, node_facts(), rendered_settings(loaded, NODE).localhost_node_ports)
    assert there <= set(found) and not absent & set(found)


@pytest.mark.parametrize(
    ("node", "families", "expected"),
    [
        (NODE, ("IPv4", "IPv6"), False),
        (NODE._replace(internal_ips=("fd00::2",)), ("IPv6", "IPv4"), True),
        (NODE._replace(internal_ips=("fd00::2",)), ("IPv6",), False),
        (None, ("IPv4", "IPv6"), True),
    ],
    ids=["IPv4 address", "IPv6 only", "IPv4 not served", "no Node"],
)
def test_the_role_kernel_gets_what_the_convergence_decided(node, families, expected):
    """An address that ``primary`` means may be unknown, and then it means all addresses."""
    configuration = load({"mode": "iptables", "nodePortAddresses": ["primary"]}).configuration
    cluster = ClusterState()
    cluster.nodes.update({} if node is None else {node.name: node})
    report = SimpleNamespace(mode="iptables", node_name="node-1", families=families, ipvs_filter_backend="")
    found = complete._kernel_settings(Request(cluster, configuration), report)
    assert found["route_localnet"] is expected
    if "IPv4" in families:
        assert rendered_settings(configuration, node).localhost_node_ports is expected


def test_explicit_values_override_the_configuration():
    none = dict.fromkeys(sysctls._CONNTRACK_SPEC, 0)
    configuration = {"mode": "ipvs", "conntrack": {"maxPerCore": 1}}
    assert MAXIMUM not in at_boot(configuration, conntrack=none)
    assert LOCALNET in at_boot(configuration, mode="iptables")
    assert ARP in at_boot(configuration, strict_arp=True)


def test_without_a_configuration_the_defaults_are_those_of_kube_proxy():
    assert at_boot(None, mode="iptables") == at_boot({"mode": "iptables"})


def tracking(liberal):
    return load({"mode": "iptables", "conntrack": {"tcpBeLiberal": liberal}}).configuration


@pytest.mark.parametrize(
    ("now", "wanted", "permissions", "expected"),
    [
        (False, False, 0o644, False),
        (False, True, 0o644, True),
        (False, True, 0o444, False),
        (True, False, 0o444, True),
        (False, True, None, True),
    ],
    ids=["neither", "will be set", "cannot be changed here", "set by others", "module not loaded yet"],
)
def test_liberal_tracking_counts_as_soon_as_it_will_be_set(tmp_path, monkeypatch, now, wanted, permissions, expected):
    if permissions is not None:
        parameter = tmp_path / "proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"
        parameter.parent.mkdir(parents=True)
        parameter.write_text(f"{int(now)}\n")
        parameter.chmod(permissions)
    monkeypatch.setattr(stages, "unchangeable", functools.partial(unchangeable, root=str(tmp_path)))
    facts = node_facts()._replace(conntrack_liberal=now)
    assert tracks_liberally(tracking(wanted), facts) is expected


@pytest.mark.parametrize("liberal", (False, True))
def test_rules_rendered_without_a_node_are_those_with_the_parameters_set(liberal):
    (text, _ipv6) = render(Request(ClusterState(), tracking(liberal), node_name="node-1")).values()
    assert ("--ctstate INVALID" in text) is not liberal
