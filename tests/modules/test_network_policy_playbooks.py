# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A change of policies over two nodes by the playbooks: previewed, applied, its drift found, and rolled back.

The nodes only enforce policies: rules of another program for Services are kept, even at the clean-up.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.lab.ansible_playbook import ansible_playbook
from tests.lab.cluster import SNAPSHOT, Lab
from tests.lab.demo.playbooks import VARIABLES
from tests.lab.topology import demonstration_nodes
from tests.modules.harness import ROOT
from tests.modules.test_network_policy_module import TABLE, snapshot

NODES = ("lab-iptables", "lab-nftables")
ONLY = {"service_proxy_network_policy_standalone": True, "proxy_prepare_kernel": False}


@pytest.fixture
def fleet():
    """Provide a function that runs a playbook on both nodes and returns its status and output, and the nodes."""
    with (
        tempfile.TemporaryDirectory(prefix="knf") as scratch,
        Lab("netpol", SNAPSHOT, NODES, demonstration_nodes(host_has_ipvs=False)) as lab,
    ):
        environment = {
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_LOCAL_TEMP": f"{scratch}/local",
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
        }

        def run(name, *options, policies):
            path = Path(scratch) / "cluster.json"
            snapshot(path, *policies)
            # The second host has the address of this Node.
            text = path.read_text(encoding="utf-8").replace('"name": "lab-ipvs"', '"name": "lab-nftables"')
            path.write_text(text, encoding="utf-8")
            argv = [*ansible_playbook(), "-i", str(lab.inventory), "-e", f"@{VARIABLES}", "-e", json.dumps(ONLY)]
            argv += ["-e", f"service_proxy_snapshot={path}", f"kubenode.proxy.{name}", *options]
            done = subprocess.run(argv, env=environment, cwd=scratch, capture_output=True, text=True, check=False)
            return done.returncode, done.stdout + done.stderr

        yield run, lab


@pytest.mark.full
def test_a_change_of_policies_over_a_fleet(fleet):
    run, lab = fleet
    before, after = [("from-web", "web")], [("from-nobody", "nobody")]

    def listed(name, *words):
        return lab.ssh(name, shlex.join(["nft", *words])).stdout

    for name in NODES:
        lab.output(name, "nft 'add table ip kube-proxy; add chain ip kube-proxy services'")
    status, output = run("converge", policies=before)
    assert status == 0, output
    assert all(f"{name}: enforces network policies only" in output for name in NODES), output
    assert "10.244.1.12" in listed("lab-iptables", "list", "map", *TABLE.split(), "grants-in4")
    status, output = run("converge", "--check", "--diff", policies=after)
    assert status == 0 and "grants-in4 { " in output and "would enforce network policies only" in output, output
    assert "10.244.1.12" in listed("lab-iptables", "list", "map", *TABLE.split(), "grants-in4"), "only a preview"
    status, output = run("converge", policies=after)
    assert status == 0, output
    assert "10.244.1.12" not in listed("lab-iptables", "list", "map", *TABLE.split(), "grants-in4")
    lab.output("lab-iptables", f"nft flush set {TABLE} isolated-in4")
    status, output = run("verify", policies=after)
    assert status != 0 and "lab-iptables has drifted" in output and "isolated-in4" in output, output
    assert "lab-nftables enforces network policies only in accordance" in output, output
    status, output = run("rollback", policies=after)
    assert status == 0, output
    assert "10.244.1.12" in listed("lab-iptables", "list", "map", *TABLE.split(), "grants-in4")
    status, output = run("cleanup", policies=after)
    assert status == 0, output
    for name in NODES:
        assert listed(name, "list", "tables").split() == ["table", "ip", "kube-proxy"]
