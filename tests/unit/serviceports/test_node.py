# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node's name and addresses, and the addresses of its node ports."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import Node
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.node import (
    NodeAddresses,
    node_addresses,
    node_name,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.node_ports import (
    node_port_addresses,
    resolve_primary,
)


def test_the_name_is_trimmed_and_lowered():
    assert node_name("", "Node-A.Example\n") == "node-a.example"
    assert node_name("  Other ", "node-a") == "other"
    assert node_name("  ", "node-a") == "node-a"
    with pytest.raises(ConfigurationError, match="hostnameOverride"):
        node_name("", " ")


def node(internal=(), external=()):
    return Node("node-a", tuple(internal), tuple(external))


@pytest.mark.parametrize(
    ("known", "bind", "expected"),
    [
        (None, "", (IPV4, "127.0.0.1", "::1")),
        (None, "0.0.0.0", (IPV4, "127.0.0.1", "::1")),
        (None, "::", (IPV4, "127.0.0.1", "::1")),
        (None, "192.0.2.1", (IPV4, "192.0.2.1", "::1")),
        (None, "fd00::1", (IPV6, "127.0.0.1", "fd00::1")),
        (node(["172.18.0.2"]), "0.0.0.0", (IPV4, "172.18.0.2", "::1")),
        (node(["fd00::2"]), "0.0.0.0", (IPV6, "127.0.0.1", "fd00::2")),
        (node(["fd00::2", "172.18.0.2"]), "", (IPV6, "172.18.0.2", "fd00::2")),
        (node(["172.18.0.2", "172.18.0.3", "fd00::2"]), "", (IPV4, "172.18.0.2", "fd00::2")),
        (node(["172.18.0.2"], ["192.0.2.9", "fd00::9"]), "", (IPV4, "172.18.0.2", "fd00::9")),
        (node([], ["fd00::9"]), "", (IPV6, "127.0.0.1", "fd00::9")),
        (node(["172.18.0.2", "fd00::2"]), "fd00::5", (IPV6, "172.18.0.2", "fd00::5")),
        (node(["fd00::2", "172.18.0.2"]), "10.0.0.1", (IPV4, "10.0.0.1", "fd00::2")),
    ],
)
def test_addresses_of_the_node(known, bind, expected):
    found = node_addresses(known, bind)
    assert found == NodeAddresses(*expected)
    assert (found.of(IPV4), found.of(IPV6)) == expected[1:]


@pytest.mark.parametrize(
    ("values", "cidrs", "match_all", "loopback"),
    [
        ([], ("0.0.0.0/0",), True, True),
        (["fd00::/8"], ("0.0.0.0/0",), True, True),
        (["0.0.0.0/0"], ("0.0.0.0/0",), True, True),
        (["192.168.0.0/16"], ("192.168.0.0/16",), False, False),
        (["192.168.1.7/16", "192.168.0.0/16"], ("192.168.0.0/16",), False, False),
        (["192.168.0.0/16", "127.0.0.0/8"], ("192.168.0.0/16", "127.0.0.0/8"), False, True),
        (["127.0.2.0/28"], ("127.0.2.0/28",), False, True),
        (["64.0.0.0/2"], ("64.0.0.0/2",), False, True),
        (["10.0.0.0/8", "0.0.0.0/0", "127.0.0.0/8"], ("0.0.0.0/0",), True, True),
    ],
)
def test_choice_for_ipv4(values, cidrs, match_all, loopback):
    assert node_port_addresses(values, IPV4)[1:] == (cidrs, match_all, loopback)


def test_choice_for_ipv6_has_no_loopback():
    assert node_port_addresses(["127.0.0.0/8", "::1/128"], IPV6)[1:] == (("::1/128",), False, False)
    assert node_port_addresses(["127.0.0.0/8"], IPV6)[1:] == (("::/0",), True, False)


def test_a_value_that_is_not_a_cidr():
    with pytest.raises(ConfigurationError, match="nodePortAddresses: 'primary' is not a CIDR"):
        node_port_addresses(["primary"], IPV4)


INTERFACES = [
    ("lo", "127.0.0.1"),
    ("eth0", "192.168.0.2"),
    ("eth1", "192.168.1.2"),
    ("eth2", "192.168.0.2"),
    ("lo", "::1"),
    ("eth0", "2001:db8::1"),
]


def test_addresses_on_which_node_ports_answer():
    every = node_port_addresses([], IPV4).node_ips(INTERFACES)
    assert every == ("127.0.0.1", "192.168.0.2", "192.168.1.2")
    assert node_port_addresses(["192.168.0.0/24"], IPV4).node_ips(INTERFACES) == ("192.168.0.2",)
    assert node_port_addresses(["192.168.0.0/24"], IPV6).node_ips(INTERFACES) == ("::1", "2001:db8::1")
    assert node_port_addresses(["10.0.0.0/8"], IPV4).node_ips(INTERFACES) == ()


@pytest.mark.parametrize(
    ("values", "known", "expected"),
    [
        (["primary"], ["192.168.0.2", "2001:db8::1"], ("192.168.0.2/32", "2001:db8::1/128")),
        (["primary"], ["192.168.0.2", "::1"], ("192.168.0.2/32",)),
        (["primary"], ["127.0.0.1", "::1"], ()),
        (["10.0.0.0/8"], ["192.168.0.2", "::1"], ("10.0.0.0/8",)),
        (["127.0.0.0/8", "primary"], ["192.168.0.2"], ("127.0.0.0/8", "192.168.0.2/32")),
        (["127.0.0.0/8", "primary"], ["::1"], ("127.0.0.0/8",)),
        ([], ["192.168.0.2"], ()),
    ],
)
def test_primary_means_the_known_addresses(values, known, expected):
    assert resolve_primary(values, known) == expected
