# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a boot has restored is removed once kube-proxy serves the node, as a real kube-proxy had programmed it."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.findings import ERROR, KUBE_PROXY, Finding
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import (
    boot,
    boot_directory,
    boot_keeping,
    boot_state,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import inspect
from tests.kernel.test_migration_adopt import CASES, make_node
from tests.lab import manifests, recorded
from tests.lab.system import run

WEEK = 7 * 86400.0
CASE = CASES / "nodeport-cluster"
PROXY = Finding(KUBE_PROXY, ERROR, "kube-proxy runs on this node (process 7)", "stop it")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(boot_directory, "DIRECTORY", str(tmp_path / "boot"))
    monkeypatch.setattr(boot_keeping, "_write_program", lambda path: Path(path).write_bytes(b"program"))
    monkeypatch.setattr(boot, "RUNTIME", str(tmp_path / "run"))
    monkeypatch.setattr(boot, "Request", functools.partial(Request, state_directory=boot.RUNTIME, whole_cluster=False))
    monkeypatch.setattr(boot, "service_proxy_findings", lambda **_options: [])


def restore(mode: str, directory: Path, filter_backend: str = "") -> str:
    """Restore the state of a node that has served one Service; return what the program says."""
    keep(mode, directory, filter_backend)
    return boot.restore_at_boot(WEEK)[0]


def keep(mode: str, directory: Path, filter_backend: str = "") -> Request:
    """Keep the state of a node that has served one Service, and return the request that has served it."""
    ports = [manifests.port(80, name="web")]
    endpoints = [manifests.endpoint("10.244.9.9", "elsewhere")]
    objects = [
        manifests.service("web", "10.96.200.1", ports),
        manifests.endpoint_slice("web", endpoints, ports),
    ]
    node = {"ipvsFilterBackend": filter_backend} if filter_backend else {}
    configuration = load({"mode": mode}, "", node).configuration
    wanted = Request(ClusterState.from_objects(objects), configuration, objects=lambda: iter(objects))
    found = boot_state.NextBoot(boot_state.BootSettings({"mode": mode}, node), True)
    unrecorded = wanted._replace(state_directory=str(directory), whole_cluster=False)
    assert boot_keeping.keep(unrecorded, found, (mode, filter_backend), "here", (), confirmed=True) == []
    return unrecorded


def recorded_rules(name: str) -> list[str]:
    """Return the rules in iptables of a recorded state, without those that need counters which few kernels have."""
    found = [block.text for block in recorded.blocks(CASE / name, 0) if block.command.startswith("iptables-save")]
    lines = [line for text in found for line in text.splitlines() if line.startswith("-A KUBE-")]
    return [line for line in lines if "nfacct" not in line]


def programmed() -> str:
    """Return both families' rules in iptables, and the tables of nftables mode, without counters."""
    saved = [run([program]) for program in ("iptables-nft-save", "ip6tables-nft-save")]
    for name in run(["nft", "list", "tables"]).splitlines():
        saved += [run(["nft", "list", *name.split()])] if name.endswith(" kube-proxy") else []
    lines = (line for text in saved for line in text.splitlines() if not line.startswith(("#", ":")))
    return "\n".join(lines)


@pytest.mark.parametrize(("mode", "other"), [("nftables", "iptables"), ("iptables", "nftables")])
def test_what_a_boot_has_restored_goes_once_kube_proxy_serves_in_another_mode(tmp_path, monkeypatch, mode, other):
    make_node()
    assert f"is restored in {mode} mode: 1 Services" in restore(mode, tmp_path)
    alone = programmed()
    assert "10.96.200.1" in alone
    # kubelet has not started it yet.
    assert boot.restore_at_boot(WEEK) == [] and programmed() == alone
    recorded.load(CASE / f"state-{other}.txt", run)
    assert boot.restore_at_boot(WEEK) == []
    monkeypatch.setattr(boot, "possible_proxies", lambda _running: [PROXY])
    (line,) = boot.restore_at_boot(WEEK)
    assert line == f"{PROXY.what}: what was restored at boot is removed, and will not be restored again"
    left = programmed()
    assert "10.96.200.1" not in left and not os.path.exists(boot_directory.DIRECTORY)
    run(["nft", "flush", "ruleset"])
    recorded.load(CASE / f"state-{other}.txt", run)
    assert left == programmed()
    assert boot.restore_at_boot(WEEK) == ["there is no state to restore"]


@pytest.mark.uml
def test_what_a_boot_has_restored_goes_once_kube_proxy_serves_by_ipvs(tmp_path, monkeypatch):
    """Its ipvs mode removes no chains of iptables mode: their rejects would stay in force."""
    make_node()
    restore("iptables", tmp_path)
    assert "10.96.200.1" in run(["iptables-legacy-save"])
    recorded.load(CASE / "state-ipvs.txt", run, "legacy")
    monkeypatch.setattr(boot, "possible_proxies", lambda _running: [PROXY])
    (line,) = boot.restore_at_boot(WEEK)
    assert line.endswith("what was restored at boot is removed, and will not be restored again")
    left = run(["iptables-legacy-save"])
    assert "10.96.200.1" not in left and "KUBE-SVC-" not in left and "KUBE-EXTERNAL-SERVICES" not in left
    for rule in recorded_rules("state-ipvs.txt"):
        assert rule in left


@pytest.mark.ipvs
@pytest.mark.parametrize("filter_backend", ["iptables", "nftables"])
def test_ipvs_mode_is_restored_with_its_filter_backend(tmp_path, filter_backend):
    make_node()
    wanted = keep("ipvs", tmp_path, filter_backend)
    assert "is restored in ipvs mode: 1 Services" in boot.restore_at_boot(WEEK)[0]
    assert "10.96.200.1:80" in run(["ipvsadm", "-Ln"])
    report = inspect(wanted)
    assert (report.ipvs_filter_backend, report.changes) == (filter_backend, ())


@pytest.mark.ipvs
def test_a_table_goes_once_kube_proxy_serves_by_ipvs(tmp_path, monkeypatch):
    """Versions before 1.31 do not remove it."""
    make_node()
    restore("nftables", tmp_path)
    recorded.load(CASE / "state-ipvs.txt", run)
    monkeypatch.setattr(boot, "possible_proxies", lambda _running: [PROXY])
    (line,) = boot.restore_at_boot(WEEK)
    assert line.endswith("what was restored at boot is removed, and will not be restored again")
    assert "10.96.200.1" not in programmed()


@pytest.mark.parametrize(("first", "then"), [("legacy", "nft"), ("nft", "legacy")])
def test_chains_in_the_variant_that_kube_proxy_does_not_use_go(tmp_path, monkeypatch, first, then):
    """At boot nothing shows which variant kubelet will use, and kube-proxy with it."""
    make_node()
    run([f"iptables-{first}", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    restore("iptables", tmp_path)
    run([f"iptables-{first}", "-t", "mangle", "-X", "KUBE-IPTABLES-HINT"])
    recorded.load(CASE / "state-iptables.txt", run, then)
    of_kube_proxy = run([f"iptables-{then}-save"]).count("KUBE-")
    monkeypatch.setattr(boot, "possible_proxies", lambda _running: [PROXY])
    (line,) = boot.restore_at_boot(WEEK, first)
    # Which variant is that of kube-proxy is not known without kubelet's chains.
    assert line.endswith("kube-proxy in the same mode has the same chains")
    assert "10.96.200.1" in run([f"iptables-{first}-save"])
    run([f"iptables-{then}", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    (line,) = boot.restore_at_boot(WEEK, first)
    assert line.endswith("what was restored at boot is removed, and will not be restored again")
    assert "KUBE-" not in run([f"iptables-{first}-save"]) + run([f"ip6tables-{first}-save"])
    assert run([f"iptables-{then}-save"]).count("KUBE-") == of_kube_proxy + 1


def other_of(variant: str) -> str:
    return "nft" if variant == "legacy" else "legacy"


def saved_rules(variant: str) -> str:
    lines = [line for program in ("iptables", "ip6tables") for line in run([f"{program}-{variant}-save"]).splitlines()]
    # Without counters: the namespace has packets of its own.
    return "\n".join(re.sub(r"\[\d+:\d+\]", "", line) for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("variant", ["legacy", "nft"])
@pytest.mark.parametrize("known", [True, False])
def test_a_kube_proxy_that_does_not_write_where_kubelet_does_keeps_its_chains(tmp_path, monkeypatch, variant, known):
    """Its image may have one variant only. The chains where kubelet writes are those that the boot has restored."""
    make_node()
    run([f"iptables-{variant}", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    restore("iptables", tmp_path)
    recorded.load(CASE / "state-iptables.txt", run, other_of(variant))
    before = saved_rules("legacy"), saved_rules("nft")
    monkeypatch.setattr(boot, "possible_proxies", lambda _running: [PROXY])
    (line,) = boot.restore_at_boot(WEEK, variant if known else "")
    assert line.endswith("what was restored stays until it serves: kube-proxy in the same mode has the same chains")
    assert (saved_rules("legacy"), saved_rules("nft")) == before and os.path.exists(boot_directory.DIRECTORY)


def test_what_was_restored_serves_until_kube_proxy_has_filled_its_chains(tmp_path, monkeypatch):
    """It makes them before it knows the Services."""
    make_node()
    run(["iptables-legacy", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    restore("iptables", tmp_path)
    run(["iptables-legacy", "-t", "mangle", "-X", "KUBE-IPTABLES-HINT"])
    run(["iptables-nft", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    run(["iptables-nft", "-t", "nat", "-N", "KUBE-SERVICES"])
    monkeypatch.setattr(boot, "possible_proxies", lambda _running: [PROXY])
    (line,) = boot.restore_at_boot(WEEK, "legacy")
    assert "what was restored stays until it serves" in line and "10.96.200.1" in run(["iptables-legacy-save"])


@pytest.mark.ipvs
@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_chains_go_that_are_in_another_variant_than_those_of_kube_proxys_ipvs_mode(tmp_path, monkeypatch, variant):
    """It has emptied KUBE-SERVICES only in its own, and these would lead past IPVS."""
    make_node()
    run([f"iptables-{variant}", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    restore("iptables", tmp_path)
    run([f"iptables-{variant}", "-t", "mangle", "-X", "KUBE-IPTABLES-HINT"])
    assert "10.96.200.1" in saved_rules(variant)
    recorded.load(CASE / "state-ipvs.txt", run, other_of(variant))
    before = saved_rules(other_of(variant))
    monkeypatch.setattr(boot, "possible_proxies", lambda _running: [PROXY])
    (line,) = boot.restore_at_boot(WEEK, variant)
    assert line.endswith("what was restored at boot is removed, and will not be restored again")
    assert "KUBE-" not in saved_rules(variant) and saved_rules(other_of(variant)) == before


def test_what_kube_proxy_has_in_the_same_chains_is_left_to_it(tmp_path, monkeypatch):
    make_node()
    restore("iptables", tmp_path)
    recorded.load(CASE / "state-iptables.txt", run)
    both = programmed()
    monkeypatch.setattr(boot, "possible_proxies", lambda _running: [PROXY])
    (line,) = boot.restore_at_boot(WEEK)
    assert line.endswith("what was restored stays until it serves: kube-proxy in the same mode has the same chains")
    assert programmed() == both and os.path.exists(boot_directory.DIRECTORY)


def test_what_kube_proxy_has_not_taken_over_yet_serves_until_it_has(tmp_path, monkeypatch):
    make_node()
    restore("nftables", tmp_path)
    alone = programmed()
    monkeypatch.setattr(boot, "possible_proxies", lambda _running: [PROXY])
    (line,) = boot.restore_at_boot(WEEK)
    assert line.startswith(f"{PROXY.what}, and what was restored stays until it serves: table kube-proxy (IPv4): ")
    assert programmed() == alone and os.path.exists(boot_directory.DIRECTORY)
