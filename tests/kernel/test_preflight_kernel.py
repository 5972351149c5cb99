# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight against a running kernel: leftovers of other programs are found, and the checks change nothing."""

from __future__ import annotations

import os

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import mode_named
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.features import nat_refused
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.check import Intention, preflight
from tests.lab.background import Background, runs_as
from tests.lab.system import run

FAMILIES = ("IPv4", "IPv6")


def rules() -> str:
    return "".join(
        run([f"{program}-{variant}-save"]) for program in ("iptables", "ip6tables") for variant in ("legacy", "nft")
    )


def test_a_clean_node_has_no_findings_and_is_not_changed():
    before = rules()
    assert preflight(Intention(mode_named("iptables").needs, FAMILIES)) == []
    assert rules() == before


@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_a_forward_policy_is_found_in_either_variant(variant):
    """Stale chains in the variant that is not in use are no finding: a convergence removes them."""
    other = "nft" if variant == "legacy" else "legacy"
    run([f"iptables-{variant}", "-P", "FORWARD", "DROP"])
    run([f"iptables-{other}", "-t", "nat", "-N", "KUBE-SERVICES"])
    variants = {family: detect_variant(family, variant) for family in FAMILIES}
    found = preflight(Intention(mode_named("iptables").needs, FAMILIES, variants=variants))
    assert [finding.name for finding in found] == ["forward-drop"]
    assert "IPv4" in found[0].what


@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_modes_without_iptables_warn_of_a_chain_that_they_cannot_overrule(variant):
    needs = mode_named("nftables").needs
    before = rules()
    assert preflight(Intention(needs, FAMILIES)) == [] and rules() == before
    # Where both variants are installed, one that has tables is the one in use.
    run([f"ip6tables-{variant}", "-P", "FORWARD", "DROP"])
    run([f"ip6tables-{variant}", "-t", "mangle", "-N", "KUBE-KUBELET-CANARY"])
    (found,) = preflight(Intention(needs, FAMILIES))
    assert found.name == "forward-drop" and found.severity == "warning" and "IPv6" in found.what
    assert preflight(Intention(needs, ("IPv4",))) == []


def test_processes_of_kube_proxy_are_found(tmp_path):
    program = tmp_path / "kube-proxy"
    program.symlink_to("/bin/sleep")
    with Background([str(program), "60"], ready=runs_as(str(program))) as running:
        found = preflight(Intention(mode_named("iptables").needs, FAMILIES))
        assert [finding.name for finding in found] == ["kube-proxy"]
        assert f"(process {running.pid})" in found[0].what
        found = preflight(Intention(mode_named("nftables").needs, FAMILIES))
        assert [finding.name for finding in found] == ["kube-proxy"]


@pytest.mark.uml
def test_ipvs_answers_in_user_mode_linux():
    os.environ.setdefault("PATH", "/usr/sbin:/usr/bin")
    assert preflight(Intention(mode_named("ipvs").needs, ("IPv4",), schedulers=("rr", "mh"))) == []
    found = preflight(Intention(mode_named("ipvs").needs, ("IPv4",), schedulers=("nosuch",)))
    assert [finding.name for finding in found] == ["modules"]
    assert "ip_vs_nosuch" in found[0].what


@pytest.mark.uml
def test_a_kernel_without_nat_in_nf_tables_is_detected():
    assert "no NAT" in nat_refused("IPv4")
    assert "no NAT" in nat_refused("IPv6")


def test_probing_for_nat_creates_nothing():
    before = run(["nft", "list", "ruleset"])
    assert nat_refused("IPv4") == ""
    assert nat_refused("IPv6") == ""
    assert run(["nft", "list", "ruleset"]) == before
