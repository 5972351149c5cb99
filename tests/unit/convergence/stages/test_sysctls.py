# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One configuration gives one set of kernel parameters: in the module sysctls at boot, and in a starting agent."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.stages.sysctls import (
    localhost_node_ports,
    wanted_sysctls,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.sysctls import profile_of
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.facts import node_facts
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.sysctl_profile import wanted_values

# The module needs Ansible, which the environments of the oldest and newest Python lack.
pytest.importorskip("ansible")
from ansible_collections.kubenode.proxy.plugins.modules import sysctls

LEFT_ALONE = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
MAXIMUM = "net.netfilter.nf_conntrack_max"
LOCALNET = "net.ipv4.conf.all.route_localnet"
ARP = "net.ipv4.conf.all.arp_ignore"
OPTIONS = {
    **dict.fromkeys(("mode", "strict_arp", "route_localnet", "estimation", "conntrack", "reserved_node_ports")),
    **dict.fromkeys(("netdev_max_backlog", "configuration")),
    "bridge_netfilter": False,
}


def at_boot(configuration, **options):
    """Return the module's parameters for a configuration on this machine."""
    return wanted_values(profile_of({**OPTIONS, "configuration": configuration, **options}, node_facts().cores))


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
        ({"nodePortAddresses": ["::1/128"]}, {LOCALNET}, set()),
        ({"mode": "ipvs", "ipvs": {"strictARP": True}}, {ARP}, {LOCALNET}),
        ({"mode": "ipvs"}, set(), {ARP, LOCALNET}),
        ({"mode": "nftables"}, {MAXIMUM}, {LOCALNET, ARP}),
    ],
)
def test_boot_and_agent_agree(configuration, there, absent):
    loaded = load(configuration).configuration
    found = at_boot(configuration)
    assert found == wanted_sysctls(loaded, node_facts(), localhost_node_ports(loaded))
    assert there <= set(found) and not absent & set(found)


def test_explicit_values_override_the_configuration():
    none = dict.fromkeys(sysctls._CONNTRACK_SPEC, 0)
    configuration = {"mode": "ipvs", "conntrack": {"maxPerCore": 1}}
    assert MAXIMUM not in at_boot(configuration, conntrack=none)
    assert LOCALNET in at_boot(configuration, mode="iptables")
    assert ARP in at_boot(configuration, strict_arp=True)


def test_without_a_configuration_the_defaults_are_those_of_kube_proxy():
    assert at_boot(None, mode="iptables") == at_boot({"mode": "iptables"})
