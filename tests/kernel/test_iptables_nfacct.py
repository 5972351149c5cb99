# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""nfacct counters read from the kernel, and rules that use them."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel import built_in
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.attributes import text_attribute
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.protocol import (
    NETLINK_NETFILTER,
    NLM_F_ACK,
    NLM_F_CREATE,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.socket import NetlinkSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import ChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.nfacct import (
    nfacct_counters,
    usable_nfacct_counters,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import VARIANTS, detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.fixed import (
    INVALID_COUNTER,
    LOCALHOST_COUNTER,
    ownership,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.kernel.convergence_node import add_external_rules, request
from tests.kernel.test_built_in import without_lists
from tests.unit.rendering.iptables.routes import by_key, endpoint, route

MATCHES = Path("/proc/net/ip_tables_matches")
HAS_NFACCT = MATCHES.exists() and "nfacct" in MATCHES.read_text().split()


def make(name: str) -> None:
    """Create a counter: message NFNL_MSG_ACCT_NEW of subsystem 7."""
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        payload = struct.pack("=BBH", 0, 0, 0) + text_attribute(1, name)
        assert not sock.transact([(7 << 8, NLM_F_CREATE | NLM_F_ACK, payload)]).errors


needs_nfacct = pytest.mark.skipif(not HAS_NFACCT, reason="this kernel has not registered the match nfacct")


def test_no_counters_are_listed_on_a_kernel_without_any() -> None:
    assert nfacct_counters() == () == usable_nfacct_counters()


@needs_nfacct
def test_counters_are_detected_by_every_sign_of_the_match(monkeypatch) -> None:
    for counter in (LOCALHOST_COUNTER, INVALID_COUNTER):
        make(counter)
    both = (INVALID_COUNTER, LOCALHOST_COUNTER)
    assert usable_nfacct_counters() == both
    # Without module lists, as in a container or on a kernel with everything built in; then also without /proc.
    without_lists(monkeypatch)
    assert usable_nfacct_counters() == both
    monkeypatch.setattr(built_in, "read_text", lambda _path: None)
    assert usable_nfacct_counters() == both
    monkeypatch.setattr(built_in, "_MATCHES", {"xt_nfacct": "no_such_match"})
    assert usable_nfacct_counters() == ()


@needs_nfacct
@pytest.mark.parametrize("variant", VARIANTS)
def test_counting_rules_of_kube_proxy_are_kept(tmp_path, monkeypatch, variant) -> None:
    """kube-proxy creates the counters; its rules that use them are adopted without a change."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    add_external_rules(variant)
    for counter in (LOCALHOST_COUNTER, INVALID_COUNTER):
        make(counter)
    assert converge(request("iptables", tmp_path)).changed
    saved = subprocess.run([f"iptables-{variant}-save"], check=True, capture_output=True, text=True).stdout
    assert f"--nfacct-name  {INVALID_COUNTER} -j DROP" in saved and f"--nfacct-name  {LOCALHOST_COUNTER}" in saved
    assert not converge(request("iptables", tmp_path, check=True)).changed


@pytest.mark.parametrize("name", VARIANTS)
def test_rules_with_counters_converge(name: str) -> None:
    for counter in (LOCALHOST_COUNTER, INVALID_COUNTER) if HAS_NFACCT else ():
        make(counter)
    counters = nfacct_counters()
    assert counters == ((INVALID_COUNTER, LOCALHOST_COUNTER) if HAS_NFACCT else ())
    settings = DataplaneSettings(family="IPv4", nfacct_counters=counters)
    routes = by_key(route(endpoints=[endpoint("10.0.0.1")], node_port=30001))
    desired = RENDERING.desired_tables(routes, settings)["chains"]
    chains = ChainsResource(detect_variant("IPv4", name), ownership(settings))
    chains.apply(difference(chains.observe(), desired))
    assert not difference(chains.observe(), desired)
