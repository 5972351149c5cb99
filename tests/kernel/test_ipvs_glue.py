# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ipvs mode with each packet filter beside IPVS: converged, changed, left and removed.

It needs a kernel with IPVS, ipset, and nf_tables with NAT: Debian's own in QEMU (``make debian``), not this machine's.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, Dict, List

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.history import restore
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.history.converged import converge
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from tests.kernel.test_convergence import cluster, remove, rules, run


def request(directory: Path, mode: str, glue: str = "auto", **more: Any) -> Request:
    document: Dict[str, Any] = {"mode": mode, "nodePortAddresses": ["primary"]}
    configuration = load(document, node_source={"ipvsGlue": glue}).configuration
    return Request(
        cluster=cluster(),
        configuration=configuration,
        node_name="node-1",
        state_directory=str(directory / "state"),
        history_directory=str(directory / "history"),
        whole_cluster=False,
        **more,
    )


def program(directory: Path, mode: str, glue: str = "auto") -> Report:
    """Converge; a check and a repetition then find no change."""
    done = converge(request(directory, mode, glue))
    for again in (converge(request(directory, mode, glue, check=True)), converge(request(directory, mode, glue))):
        assert (again.changed, again.changes) == (False, ())
    return done


def of_iptables() -> List[str]:
    """Return what the glue iptables has on the node."""
    saved = [line for name in ("iptables", "ip6tables") for line in run(f"{name}-nft-save").splitlines()]
    return [line for line in saved if "KUBE-" in line] + run("ipset", "list", "-n").splitlines()


def of_nftables() -> List[str]:
    """Return the tables that the glue nftables has on the node."""
    return [line for line in run("nft", "list", "tables").splitlines() if "kubenode-ipvs" in line]


def servers() -> List[str]:
    return sorted(run("ipvsadm", "-Sn").splitlines())


def test_a_change_of_the_glue_leaves_nothing_of_the_other_one(tmp_path):
    empty = rules()
    first = program(tmp_path, "ipvs", "iptables")
    assert first.ipvs_glue == "iptables" and of_iptables() and not of_nftables()
    served = servers()
    second = program(tmp_path, "ipvs", "nftables")
    assert second.ipvs_glue == "nftables" and not of_iptables()
    assert of_nftables() == ["table ip kubenode-ipvs", "table ip6 kubenode-ipvs"]
    # What serves the node stays, and virtual servers do not depend on it.
    assert program(tmp_path, "ipvs").ipvs_glue == "nftables"
    third = program(tmp_path, "ipvs", "iptables")
    assert third.ipvs_glue == "iptables" and of_iptables() and not of_nftables()
    assert program(tmp_path, "ipvs").ipvs_glue == "iptables" and servers() == served
    program(tmp_path, "ipvs", "nftables")
    assert remove(tmp_path / "state").changed
    assert rules() == empty and not remove(tmp_path / "state").changed


@pytest.mark.parametrize("other", ["nftables", "iptables"])
def test_changes_to_other_modes_and_back(tmp_path, other):
    program(tmp_path, "ipvs", "nftables")
    served = servers()
    program(tmp_path, other)
    assert not of_nftables() and not servers() and not run("ipset", "list", "-n")
    program(tmp_path, "ipvs", "nftables")
    assert servers() == served and not of_iptables()
    assert "table ip kube-proxy" not in run("nft", "list", "tables").splitlines()
    remove(tmp_path / "state")


def test_external_changes_are_found_and_repaired(tmp_path):
    program(tmp_path, "ipvs", "nftables")
    before = run("nft", "list", "ruleset")
    for damage in (
        "flush set ip kubenode-ipvs cluster-ip-frontends",
        "flush chain ip6 kubenode-ipvs services",
        "delete table ip kubenode-ipvs",
    ):
        subprocess.run(["nft", *damage.split()], check=True)
        found = converge(request(tmp_path, "ipvs", "nftables", check=True))
        assert [change.table for change in found.changes] == [f"IPv{6 if 'ip6' in damage else 4} IPVS table objects"]
        program(tmp_path, "ipvs", "nftables")
        assert sorted(run("nft", "list", "ruleset").split()) == sorted(before.split())
    remove(tmp_path / "state")


def test_a_rollback_restores_either_glue(tmp_path):
    program(tmp_path, "ipvs", "iptables")
    chains, served = of_iptables(), servers()
    changed = program(tmp_path, "ipvs", "nftables")
    tables = sorted(run("nft", "list", "ruleset").split())
    asked = restore.RollbackRequest(
        to=changed.saved_state,
        history_directory=str(tmp_path / "history"),
        state_directory=str(tmp_path / "state"),
        stop_units=False,
    )
    back = restore.rollback(asked)
    assert back.changed and not of_nftables() and servers() == served
    assert sorted(re.sub(r"\[\d+:\d+\]", "", line) for line in of_iptables()) == sorted(
        re.sub(r"\[\d+:\d+\]", "", line) for line in chains
    )
    assert not restore.rollback(asked).changed
    again = restore.rollback(asked._replace(to=back.saved))
    assert again.changed and not of_iptables() and servers() == served
    assert sorted(run("nft", "list", "ruleset").split()) == tables
    remove(tmp_path / "state")
