# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ipvs mode with each packet filter beside IPVS: converged, changed, left and removed.

It needs a kernel with IPVS, ipset, and nf_tables with NAT: Debian's own in QEMU (``make debian``), not this machine's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.command.connection_lines import follow_flows
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import restore
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.conformance.wirelab.cases import load_case
from tests.kernel.convergence_node import cluster, remove, rules
from tests.kernel.explained import explain_everything
from tests.lab import recorded, system
from tests.lab.system import run
from tests.waiting import wait_for

pytestmark = pytest.mark.ipvs
CASE = load_case(str(Path(__file__).resolve().parents[2] / "tests" / "conformance" / "cases" / "nodeport-cluster"))


def request(directory: Path, mode: str, filter_backend: str = "auto", **more: Any) -> Request:
    document: dict[str, Any] = {"mode": mode, "nodePortAddresses": ["primary"]}
    configuration = load(document, node_source={"ipvsFilterBackend": filter_backend}).configuration
    return Request(
        cluster=cluster(),
        configuration=configuration,
        node_name="node-1",
        state_directory=str(directory / "state"),
        history_directory=str(directory / "history"),
        whole_cluster=False,
        **more,
    )


def program(directory: Path, mode: str, filter_backend: str = "auto") -> Report:
    """Converge; a check and a repetition then find no change."""
    done = converge(request(directory, mode, filter_backend))
    for again in (
        converge(request(directory, mode, filter_backend, check=True)),
        converge(request(directory, mode, filter_backend)),
    ):
        assert (again.changed, again.changes) == (False, ())
    return done


def of_iptables() -> list[str]:
    """Return what the filter backend iptables has on the node."""
    saved = [line for name in ("iptables", "ip6tables") for line in run([f"{name}-nft-save"]).splitlines()]
    return [line for line in saved if "KUBE-" in line] + run(["ipset", "list", "-n"]).splitlines()


def of_nftables() -> list[str]:
    """Return the tables that the filter backend nftables has on the node."""
    return [line for line in run(["nft", "list", "tables"]).splitlines() if "kubenode-ipvs" in line]


def servers() -> list[str]:
    return sorted(run(["ipvsadm", "-Sn"]).splitlines())


def test_a_change_of_the_filter_backend_leaves_nothing_of_the_other_one(tmp_path):
    empty = rules()
    first = program(tmp_path, "ipvs", "iptables")
    assert first.ipvs_filter_backend == "iptables" and of_iptables() and not of_nftables()
    served = servers()
    second = program(tmp_path, "ipvs", "nftables")
    assert second.ipvs_filter_backend == "nftables" and not of_iptables()
    assert of_nftables() == ["table ip kubenode-ipvs", "table ip6 kubenode-ipvs"]
    # What serves the node stays, and virtual servers do not depend on it.
    assert program(tmp_path, "ipvs").ipvs_filter_backend == "nftables"
    third = program(tmp_path, "ipvs", "iptables")
    assert third.ipvs_filter_backend == "iptables" and of_iptables() and not of_nftables()
    assert program(tmp_path, "ipvs").ipvs_filter_backend == "iptables" and servers() == served
    program(tmp_path, "ipvs", "nftables")
    assert remove(tmp_path / "state").changed
    assert rules() == empty and not remove(tmp_path / "state").changed


def test_auto_is_what_serves_the_node_else_nftables(tmp_path):
    assert program(tmp_path, "ipvs").ipvs_filter_backend == "nftables" and not of_iptables()
    remove(tmp_path / "state")
    recorded.load(Path(CASE.file("state-ipvs.txt")), system.run, "nft")
    assert converge(request(tmp_path, "ipvs", check=True)).ipvs_filter_backend == "iptables"
    remove(tmp_path / "state")


def test_auto_prefers_iptables_where_only_a_rule_of_iptables_accepts_what_is_forwarded(tmp_path):
    run(["ip6tables-nft", "-P", "FORWARD", "DROP"])
    chosen = converge(request(tmp_path, "ipvs", check=True))
    assert chosen.ipvs_filter_backend == "iptables"
    assert "filter backend nftables is not preferred: IPv6: the policy of chain FORWARD" in chosen.mode_reason
    run(["ip6tables-nft", "-P", "FORWARD", "ACCEPT"])
    assert converge(request(tmp_path, "ipvs", check=True)).ipvs_filter_backend == "nftables"


def test_the_table_is_removed_when_kube_proxy_serves_in_ipvs_mode(tmp_path):
    program(tmp_path, "ipvs", "nftables")
    served = servers()
    release = request(tmp_path, "ipvs", state="handed_over")
    with pytest.raises(KernelError, match="kube-proxy has no chains of ipvs mode"):
        converge(release)
    assert len(of_nftables()) == 2
    for tool in ("iptables", "ip6tables"):
        run([f"{tool}-nft", "-t", "nat", "-N", "KUBE-LOAD-BALANCER"])
    assert converge(release).changed and not of_nftables()
    assert not converge(release).changed and servers() == served
    remove(tmp_path / "state")


@pytest.mark.parametrize("other", ["nftables", "iptables"])
def test_changes_to_other_modes_and_back(tmp_path, other):
    program(tmp_path, "ipvs", "nftables")
    served = servers()
    program(tmp_path, other)
    assert not of_nftables() and not servers() and not run(["ipset", "list", "-n"])
    program(tmp_path, "ipvs", "nftables")
    assert servers() == served and not of_iptables()
    assert "table ip kube-proxy" not in run(["nft", "list", "tables"]).splitlines()
    remove(tmp_path / "state")


def test_external_changes_are_found_and_repaired(tmp_path):
    program(tmp_path, "ipvs", "nftables")
    before = run(["nft", "list", "ruleset"])
    for damage in (
        "flush set ip kubenode-ipvs cluster-ip-frontends",
        "flush chain ip6 kubenode-ipvs services",
        "delete table ip kubenode-ipvs",
    ):
        subprocess.run(["nft", *damage.split()], check=True)
        found = converge(request(tmp_path, "ipvs", "nftables", check=True))
        assert [change.table for change in found.changes] == [f"IPv{6 if 'ip6' in damage else 4} IPVS table objects"]
        program(tmp_path, "ipvs", "nftables")
        assert sorted(run(["nft", "list", "ruleset"]).split()) == sorted(before.split())
    remove(tmp_path / "state")


def test_flows_are_explained_with_what_each_filter_backend_holds(tmp_path):
    for filter_backend, name in (("iptables", "add KUBE-"), ("nftables", "kubenode-ipvs")):
        program(tmp_path, "ipvs", filter_backend)
        found = explain_everything(request(tmp_path, "ipvs", filter_backend)).values()
        assert [flow["differences"] for flow in found if flow["differences"]] == []
        assert all(any(name in row["line"] for row in flow["kernel"]) for flow in found)
    run(["nft", "flush", "set", "ip", "kubenode-ipvs", "cluster-ip-frontends"])
    flows = explain_everything(request(tmp_path, "ipvs", "nftables")).values()
    (plain,) = [flow for flow in flows if (flow["service"], flow["family"]) == ("shop/plain", "IPv4")]
    assert any("missing in the kernel: element ip kubenode-ipvs" in line for line in plain["differences"])
    remove(tmp_path / "state")


@pytest.mark.parametrize(
    ("filter_backend", "table", "chains"),
    [
        ("nftables", "ip kubenode-ipvs", ["nat-output", "nat-postrouting"]),
        ("iptables", "ip nat", ["OUTPUT", "POSTROUTING"]),
    ],
)
def test_packets_are_followed_to_ipvs_and_behind_it(tmp_path, filter_backend, table, chains):
    program(tmp_path, "ipvs", filter_backend)
    explained = explain_everything(request(tmp_path, "ipvs", filter_backend))
    (flow,) = [found for name, found in explained.items() if name.startswith("10.96.0.1:80")]
    endpoints = [f"10.244.1.{last}" for last in (1, 2, 3)]
    addresses = (flow["source"], *endpoints)
    system.ip_batch([f"address add {address}/32 dev lo" for address in addresses])
    document: dict[str, Any] = {"flows": [flow]}
    with contextlib.ExitStack() as stack:
        for address in endpoints:
            stack.enter_context(socket.create_server((address, 8080)))
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
        followed = pool.submit(follow_flows, document, 10.0)
        wait_for(lambda: "kubenode-trace" in run(["nft", "list", "tables"]), 60, 0.2)
        socket.create_connection(("10.96.0.1", 80), 30, (flow["source"], 0)).close()
        followed.result()
    assert "problems" not in document
    found = [hit["chain"] for hit in document["traced"] if hit["packet"] == 1 and hit["table"] == table]
    before, behind = chains
    assert found.index(before) < found.index(behind)
    assert "kubenode-trace" not in run(["nft", "list", "tables"])
    # They are addresses of the node, so node ports would get virtual servers there.
    system.ip_batch([f"address del {address}/32 dev lo" for address in addresses])
    assert not converge(request(tmp_path, "ipvs", filter_backend, check=True)).changed
    remove(tmp_path / "state")


def roll_back(directory: Path, number: int) -> restore.RollbackReport:
    return restore.rollback(
        restore.RollbackRequest(
            to=number,
            history_directory=str(directory / "history"),
            state_directory=str(directory / "state"),
            stop_units=False,
        )
    )


def test_a_rollback_keeps_what_is_connected_now_and_not_what_was_when_the_state_was_saved(tmp_path):
    endpoints = [f"10.244.{number}.{last}" for number in (1, 2) for last in (1, 2, 3)]
    system.ip_batch(
        [
            "link add endpoints type dummy",
            *(f"address add {address}/32 dev endpoints" for address in endpoints),
            "link set endpoints up",
        ]
    )
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server((address, 8080))) for address in endpoints]

        def connected(address: str) -> socket.socket:
            return stack.enter_context(socket.create_connection((address, 80), 30))

        def arrived() -> int:
            """Return how many open connections have brought data to an endpoint."""
            found = 0
            for listener in listeners:
                listener.settimeout(0)
                with contextlib.suppress(BlockingIOError):
                    accepted, _peer = listener.accept()
                    accepted.settimeout(30)
                    with accepted:
                        found += accepted.recv(1) == b"x"
            return found

        program(tmp_path, "ipvs", "nftables")
        before = connected("10.96.0.1")
        left = program(tmp_path, "nftables")
        assert left.changed and any("10.96.0.1:80" in line for line in servers())
        saved = program(tmp_path, "ipvs", "nftables").saved_state
        later = connected("10.96.0.2")
        assert saved is not None
        back = roll_back(tmp_path, saved)
        assert any("are kept with their virtual servers" in text for text in back.warnings)
        assert {line.split()[2] for line in servers() if line.startswith("-A")} == {"10.96.0.1:80", "10.96.0.2:80"}
        assert "table ip kube-proxy" in run(["nft", "list", "tables"]).splitlines()
        assert "chain" not in run(["nft", "list", "table", "ip", "kubenode-ipvs"])
        assert not roll_back(tmp_path, saved).changed
        for client in (before, later):
            client.sendall(b"x")
        assert arrived() == 2
    remove(tmp_path / "state")


def test_a_rollback_restores_either_filter_backend(tmp_path):
    program(tmp_path, "ipvs", "iptables")
    chains, served = of_iptables(), servers()
    changed = program(tmp_path, "ipvs", "nftables")
    tables = sorted(run(["nft", "list", "ruleset"]).split())
    assert changed.saved_state is not None
    back = roll_back(tmp_path, changed.saved_state)
    assert back.changed and not of_nftables() and servers() == served
    assert sorted(re.sub(r"\[\d+:\d+\]", "", line) for line in of_iptables()) == sorted(
        re.sub(r"\[\d+:\d+\]", "", line) for line in chains
    )
    assert not roll_back(tmp_path, changed.saved_state).changed
    assert back.saved is not None
    again = roll_back(tmp_path, back.saved)
    assert again.changed and not of_iptables() and servers() == served
    assert sorted(run(["nft", "list", "ruleset"]).split()) == tables
    remove(tmp_path / "state")
