# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""nfacct counters read from the kernel, and rules that count with them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink import (
    NETLINK_NETFILTER,
    NLM_F_ACK,
    NLM_F_CREATE,
    NetlinkSocket,
    text_attribute,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import ChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.nfacct import nfacct_counters
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import VARIANTS, detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.fixed import (
    INVALID_COUNTER,
    LOCALHOST_COUNTER,
    ownership,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.render import desired_tables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.unit.iptables.routes import by_key, endpoint, route

MATCHES = Path("/proc/net/ip_tables_matches")
HAS_NFACCT = MATCHES.exists() and "nfacct" in MATCHES.read_text().split()


def make(name: str) -> None:
    """Create a counter: message NFNL_MSG_ACCT_NEW of subsystem 7."""
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        payload = struct.pack("=BBH", 0, 0, 0) + text_attribute(1, name)
        assert not sock.transact([(7 << 8, NLM_F_CREATE | NLM_F_ACK, payload)]).errors


def test_without_counters_there_are_none() -> None:
    assert nfacct_counters() == ()


@pytest.mark.parametrize("name", VARIANTS)
def test_rules_with_counters_converge(name: str) -> None:
    for counter in (LOCALHOST_COUNTER, INVALID_COUNTER) if HAS_NFACCT else ():
        make(counter)
    counters = nfacct_counters()
    assert counters == ((INVALID_COUNTER, LOCALHOST_COUNTER) if HAS_NFACCT else ())
    settings = DataplaneSettings(family="IPv4", nfacct_counters=counters)
    routes = by_key(route(endpoints=[endpoint("10.0.0.1")], node_port=30001))
    desired = desired_tables(routes, settings)["chains"]
    chains = ChainsResource(detect_variant("IPv4", name), ownership(settings))
    chains.apply(difference(chains.observe(), desired))
    assert not difference(chains.observe(), desired)
