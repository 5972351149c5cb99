# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Input that would empty a node, or that belongs to another node, is refused before the kernel is touched."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import PreflightError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge, inspect
from tests.kernel.convergence_node import UML, refuse_writes
from tests.lab import manifests

NODE = {
    "kind": "Node",
    "metadata": {"name": "worker-1", "labels": {"kubernetes.io/hostname": "w1"}},
    "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.11"}]},
}
MODES = ["iptables", "nftables", pytest.param("ipvs", marks=(UML, pytest.mark.full))]


def service(number: int) -> dict[str, Any]:
    addresses = (f"10.96.0.{number}", f"fd00:96::{number}")
    # Every other Service has its own chains in nftables mode.
    more = {"sessionAffinity": "ClientIP"} if number % 2 else {}
    external = [f"198.51.100.{number}"]
    return manifests.service(
        f"web-{number}", addresses, [manifests.port(80)], namespace="shop", externalIPs=external, **more
    )


def slices(number: int) -> list[dict[str, Any]]:
    return [
        manifests.endpoint_slice(
            f"web-{number}",
            [manifests.endpoint(f"{prefix}{number}")],
            [manifests.port(8080)],
            name=f"web-{number}-{family}",
            namespace="shop",
        )
        for family, prefix in (("ipv4", "10.244.0."), ("ipv6", "fd00:244::"))
    ]


def cluster(services: int, served: int, *others: dict[str, Any]) -> ClusterState:
    """Return a cluster with a number of Services, the first ``served`` of them with endpoints."""
    objects = [service(number) for number in range(1, services + 1)]
    objects += [item for number in range(1, served + 1) for item in slices(number)]
    return ClusterState.from_objects([*objects, NODE, *others])


def run(directory: Path, mode: str, state: ClusterState, **fields: Any) -> Report:
    configuration = load({"mode": mode, "nodePortAddresses": ["primary"]}).configuration
    values = {"node_name": "worker-1", "state_directory": str(directory / "state"), **fields}
    return converge(Request(state, configuration, **values))


def rules() -> str:
    commands = ["iptables-legacy-save", "ip6tables-legacy-save", "iptables-nft-save", "ip6tables-nft-save"]
    saved = [subprocess.run([name], capture_output=True, text=True, check=False).stdout for name in commands]
    listed = subprocess.run(["nft", "-s", "list", "ruleset"], capture_output=True, text=True, check=False).stdout
    servers = subprocess.run(["ipvsadm", "-Sn"], capture_output=True, text=True, check=False).stdout
    text = "\n".join([*saved, listed, servers])
    return "\n".join(line for line in text.splitlines() if not line.startswith(("#", ":")))


def refusal(directory: Path, mode: str, state: ClusterState, **fields: Any) -> str:
    """Return the error of a refused convergence, after checking that neither it nor a check changes the kernel."""
    before = rules()
    with pytest.raises(PreflightError) as checked:
        run(directory, mode, state, check=True, **fields)
    with pytest.raises(PreflightError) as raised:
        run(directory, mode, state, **fields)
    assert rules() == before
    assert str(raised.value) == str(checked.value)
    return str(raised.value)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_of_most_services_is_refused(tmp_path, mode):
    run(tmp_path, mode, cluster(12, 12))
    assert run(tmp_path, mode, cluster(12, 6)).counts["without_endpoints"] == 6, "losing half of them is accepted"
    run(tmp_path, mode, cluster(12, 12))
    reason = refusal(tmp_path, mode, cluster(12, 5))
    assert reason.startswith("7 of the 12 Services that have endpoints on this node would lose all of them (")
    assert "(shop/web-10, shop/web-11," in reason
    assert " and 2 more), more than 50 %: " in reason and reason.endswith("[loss]")
    assert "10.96.0." in refusal(tmp_path, mode, cluster(5, 5)), "deleted Services count as lost"
    assert refusal(tmp_path, mode, cluster(12, 11), max_unserved_percent=5.0)
    report = inspect(
        Request(cluster(12, 5), load({"mode": mode}).configuration, "worker-1", state_directory=str(tmp_path / "state"))
    )
    assert report.changed, "check mode reports the difference"
    ignored = run(tmp_path, mode, cluster(12, 5), ignore_findings=("loss",))
    assert any(warning.startswith("ignored: 7 of the 12") for warning in ignored.warnings)
    assert not run(tmp_path, mode, cluster(12, 5)).changed
    run(tmp_path, mode, cluster(12, 1))  # too few Services for the guard to judge


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("iptables", "nftables"),
        ("nftables", "iptables"),
        pytest.param("iptables", "ipvs", marks=(UML, pytest.mark.full)),
        pytest.param("ipvs", "iptables", marks=(UML, pytest.mark.full)),
    ],
)
def test_a_loss_is_noticed_across_a_change_of_modes(tmp_path, before, after):
    run(tmp_path, before, cluster(12, 12))
    assert refusal(tmp_path, after, cluster(12, 2)).startswith("10 of the 12 Services")
    run(tmp_path, after, cluster(12, 12))


def test_an_unattended_run_refuses_a_loss_once(tmp_path):
    run(tmp_path, "nftables", cluster(12, 12))
    assert refusal(tmp_path, "nftables", cluster(12, 1), unattended=True).endswith("if it finds the same")
    run(tmp_path, "nftables", cluster(12, 12), unattended=True)
    refusal(tmp_path, "nftables", cluster(12, 1), unattended=True)
    with pytest.raises(PreflightError, match="incomplete-snapshot"):
        run(tmp_path, "nftables", ClusterState.from_objects(()), unattended=True)
    report = run(tmp_path, "nftables", cluster(12, 1), unattended=True)
    assert report.changed and any("two consecutive runs found it: 11 of the 12" in item for item in report.warnings)


def test_on_a_full_disk_a_loss_is_refused_and_a_loss_found_by_two_runs_is_applied(tmp_path, monkeypatch):
    """Only the record of a refusal depends on the disk; without it the next run refuses again."""
    run(tmp_path, "nftables", cluster(12, 12))
    with monkeypatch.context() as full:
        refuse_writes(full)
        for _attempt in range(2):
            with pytest.raises(PreflightError, match=r"would lose all .*No space left .* will refuse the loss again"):
                run(tmp_path, "nftables", cluster(12, 1), unattended=True)
    refusal(tmp_path, "nftables", cluster(12, 1), unattended=True)
    with monkeypatch.context() as full:
        refuse_writes(full)
        report = run(tmp_path, "nftables", cluster(12, 1), unattended=True)
    assert report.changed and any("the next run applies a loss at once" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ({"Service"}, "no Service,"),
        ({"EndpointSlice"}, "no EndpointSlice,"),
        ({"Node"}, "no Node,"),
        ({"EndpointSlice", "Node"}, "no EndpointSlice and no Node,"),
        ({"Service", "EndpointSlice", "Node"}, "no Service and no EndpointSlice and no Node,"),
    ],
)
def test_an_incomplete_cluster_state_is_refused(tmp_path, missing, named):
    objects = [item for item in (service(1), *slices(1), NODE) if item["kind"] not in missing]
    state = ClusterState.from_objects(objects)
    reason = refusal(tmp_path, "nftables", state)
    assert f"the cluster state has {named} so it is not that of a complete cluster" in reason
    assert '"kubectl get services,endpointslices,nodes -A -o json"' in reason and "[incomplete-snapshot]" in reason
    report = run(tmp_path, "nftables", state, ignore_findings=("incomplete-snapshot",))
    assert any("[incomplete-snapshot]" in warning for warning in report.warnings)
    assert report.warnings == tuple(dict.fromkeys(report.warnings))


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        ("worker-1.example.com", "Node worker-1 has the same short name"),
        ("w1", "Node worker-1 has this host's name in its label kubernetes.io/hostname"),
        ("w1.example.com", "Node worker-1 has this host's name in its label kubernetes.io/hostname"),
        ("bastion", ""),
    ],
)
def test_a_host_without_a_node_object_is_refused(tmp_path, name, likely):
    reason = refusal(tmp_path, "nftables", cluster(1, 1), node_name=name)
    assert f"no Node is named {name} (the cluster state has worker-1)" in reason and reason.endswith("[node]")
    assert likely in reason if likely else "outside the cluster" in reason
    assert any(
        "[node]" in item
        for item in run(tmp_path, "nftables", cluster(1, 1), node_name=name, ignore_findings=("node",)).warnings
    )


def test_the_node_with_the_address_of_the_host_is_named(tmp_path):
    subprocess.run(["ip", "address", "add", "192.0.2.11/32", "dev", "lo"], check=True)
    reason = refusal(tmp_path, "nftables", cluster(1, 1), node_name="bastion")
    assert "Node worker-1 has this host's address 192.0.2.11: set node_name" in reason


@pytest.mark.parametrize("mode", MODES)
def test_the_name_of_the_node_of_another_host_is_refused(tmp_path, mode):
    """One name for all hosts, in group_vars for example, would make the pods of that Node local everywhere."""
    other = {"kind": "Node", "metadata": {"name": "worker-2"}}
    other["status"] = {"addresses": [{"type": "InternalIP", "address": "192.0.2.12"}]}
    state = ClusterState.from_objects([service(1), *slices(1), NODE, other])
    for name in ("worker-1", "worker-2"):
        # As for an agent, which may read no other Node: no node port of this one would be served.
        (line,) = [item for item in run(tmp_path, mode, state, node_name=name).warnings if "[node]" in item]
        assert f"Node {name} has no address of this host" in line
    subprocess.run(["ip", "address", "add", "192.0.2.11/32", "dev", "lo"], check=True)
    reason = refusal(tmp_path, mode, state, node_name="worker-2")
    assert "Node worker-2 has no address of this host; Node worker-1 has this host's address 192.0.2.11: set" in reason
    subprocess.run(["ip", "address", "add", "192.0.2.12/32", "dev", "lo"], check=True)
    assert not any("[node]" in item for item in run(tmp_path, mode, state, node_name="worker-2").warnings)


def test_a_host_outside_the_cluster_needs_no_node(tmp_path):
    objects = [service(1), *slices(1)]
    for state in (ClusterState.from_objects(objects), cluster(1, 1)):
        report = run(tmp_path, "nftables", state, node_name="bastion", outside_host=True)
        assert report.counts["endpoints"] == 2 and not any("Node" in warning for warning in report.warnings)


@pytest.mark.parametrize("mode", MODES)
def test_an_external_ip_cannot_take_over_a_cluster_ip(tmp_path, mode):
    """The rules of the attacked Service are identical with and without the attacker's Service."""
    victim, attacker = service(1), service(2)
    attacker["metadata"] = {"namespace": "a-tenant", "name": "web-2", "creationTimestamp": "2020-01-01T00:00:00Z"}
    attacker["spec"]["externalIPs"] = ["10.96.0.1"]
    labels = {"kubernetes.io/service-name": "web-2"}
    slices_of_attacker = [
        {**item, "metadata": {**item["metadata"], "namespace": "a-tenant", "labels": labels}} for item in slices(2)
    ]
    objects = [attacker, *slices_of_attacker, *slices(1), NODE]
    report = run(tmp_path, mode, ClusterState.from_objects([victim, *objects]))
    (warning,) = [item for item in report.warnings if "is claimed by" in item]
    assert warning == (
        "10.96.0.1:80/TCP is claimed by Service shop/web-1 (cluster IP) and Service a-tenant/web-2 (external IP); "
        "shop/web-1 gets it"
    )
    attacked = rules()
    attacker["spec"]["externalIPs"] = []
    run(tmp_path, mode, ClusterState.from_objects([victim, *objects]))
    if mode != "iptables":  # where the chain for external traffic is removed because nothing jumps to it
        assert rules() == attacked
    attacker["spec"]["externalIPs"] = ["10.96.0.1"]
    run(tmp_path, mode, ClusterState.from_objects(objects))
    assert "10.96.0.1" in rules()
