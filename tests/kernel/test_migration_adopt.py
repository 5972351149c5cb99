# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node programmed by a real kube-proxy is adopted without changes if the mode is the same.

The state that kube-proxy 1.36 programmed for a conformance case is loaded into a namespace. A check must report no
difference, and a convergence must keep every rule, set and server byte for byte. The layout of nftables mode differs
on purpose: there everything of kube-proxy's is replaced in one transaction.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import PreflightError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence import loss
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight import cluster_state
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.conformance.wirelab.cases import Case, load_case
from tests.lab import recorded
from tests.lab.system import ip_batch, run

CASES = Path(__file__).resolve().parents[1] / "conformance" / "cases"
# Every kind of rule: affinity, source ranges, rejects, policies, health check ports, SCTP, unusual modes.
IPTABLES = (
    "affinity",
    "clusterip-no-endpoints",
    "clusterip-sctp",
    "detect-bridge",
    "external-ips-local",
    "forward-policy-drop",
    "health-check-node-port",
    "internal-local-none-local",
    "lb-local",
    "lb-shared-address",
    "lb-source-ranges",
    "many-endpoints",
    "masquerade-all",
    "nodeport-addresses",
    "nodeport-cluster",
    "terminating-local",
)
# Recorded in both families.
IPVS = (
    pytest.param("affinity-endpoint-changes", marks=pytest.mark.full),
    "clusterip-sctp",
    pytest.param("external-ips", marks=pytest.mark.full),
    "lb-vip",
    pytest.param("nodeport-addresses", marks=pytest.mark.full),
    "nodeport-cluster",
)
NFTABLES = ("affinity", "lb-source-ranges", "nodeport-cluster", "terminating-local")
# The addresses of the recorded node, each of which has virtual servers for node ports.
ADDRESSES = {
    "eth0": ("172.18.0.2/24", "fd00:172:18::2/64"),
    "eth1": ("172.19.0.2/24", "fd00:172:19::2/64"),
    "vethpod1": ("10.244.1.1/32", "fd00:10:244:1::1/128"),
}
IPVS_SYSCTLS = {"conntrack": 1, "expire_nodest_conn": 1, "expire_quiescent_template": 1}
COUNTERS = re.compile(r"\[\d+:\d+\]")


def make_node() -> None:
    """Give the test's namespace the addresses of the recorded node."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")
    lines = []
    for device, addresses in ADDRESSES.items():
        lines += [f"link add {device} type veth peer name {device}x", f"link set {device} up"]
        lines += [f"address add {address} dev {device}{' nodad' if ':' in address else ''}" for address in addresses]
    ip_batch(lines)


def load_recorded(case: Case, mode: str, variant: str, later: bool = False) -> None:
    """Load what kube-proxy had programmed, and the kernel parameters it had set; ``later``: as 1.38 would have."""
    recorded.load(Path(case.file(f"state-{mode}.txt")), run, variant, later=later)
    if mode == "iptables" and not case.config.get("nodePortAddresses"):
        Path("/proc/sys/net/ipv4/conf/all/route_localnet").write_text("1", encoding="ascii")
    if mode == "ipvs":
        for name, value in IPVS_SYSCTLS.items():
            Path("/proc/sys/net/ipv4/vs", name).write_text(str(value), encoding="ascii")


def convergence(case: Case, mode: str, directory: Path, check: bool, **own: object) -> Report:
    """Converge to the first state of a case; ``own``: sections of the NodeProxyConfiguration."""
    return converge(
        Request(
            whole_cluster=False,
            cluster=ClusterState.from_objects(case.snapshots()[0]),
            configuration=load(case.proxy_configuration(mode, "", None), node_source=own or None).configuration,
            node_name=case.node,
            mode=mode,
            check=check,
            describe=True,
            state_directory=str(directory / "state"),
        )
    )


def rules(variant: str) -> list[str]:
    """Return both families as the usual tool saves them, without packet counters."""
    saved = []
    for family in ("iptables", "ip6tables"):
        text = run([f"{family}-{variant}-save", "-c"])
        saved += [COUNTERS.sub("", line) for line in text.splitlines() if not line.startswith("#")]
    return saved


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_iptables_mode_finds_nothing_to_change_after_kube_proxy(tmp_path, variant):
    make_node()
    for name in IPTABLES:
        case = load_case(str(CASES / name))
        load_recorded(case, "iptables", variant)
        before = rules(variant)
        assert any("KUBE-SVC-" in line for line in before), name
        assert convergence(case, "iptables", tmp_path, check=True).changes == (), name
        assert not convergence(case, "iptables", tmp_path, check=False).changed, name
        assert rules(variant) == before, name
        for family in ("iptables", "ip6tables"):
            empty = "".join(f"*{table}\nCOMMIT\n" for table in ("mangle", "filter", "nat"))
            run([f"{family}-{variant}-restore"], empty)


@pytest.mark.uml
@pytest.mark.parametrize("name", IPVS)
def test_ipvs_mode_finds_nothing_to_change_after_kube_proxy(tmp_path, name):
    make_node()
    case = load_case(str(CASES / name))
    load_recorded(case, "ipvs", "legacy")

    def kernel() -> list[str]:
        seen = [*rules("legacy"), run(["ipvsadm", "-Sn"]), run(["ipset", "save"])]
        return [*seen, run(["ip", "-o", "address", "show", "dev", "kube-ipvs0"])]

    before = kernel()
    assert "10.96." in before[-1] or "fd00:10:96" in before[-1]
    assert convergence(case, "ipvs", tmp_path, check=True).changes == ()
    assert not convergence(case, "ipvs", tmp_path, check=False).changed
    assert kernel() == before


@pytest.mark.parametrize("later", [False, True], ids=["1.36", "1.38"])
@pytest.mark.parametrize("name", NFTABLES)
def test_nftables_mode_reports_what_it_replaces_and_does_so_once(tmp_path, name, later):
    make_node()
    case = load_case(str(CASES / name))
    load_recorded(case, "nftables", "", later)
    before = run(["nft", "list", "ruleset"])
    found = convergence(case, "nftables", tmp_path, check=True)
    assert run(["nft", "list", "ruleset"]) == before
    assert {change.table for change in found.changes} == {"IPv4 table objects", "IPv6 table objects"}
    assert any("service-ips" in line for change in found.changes for line in change.before)
    done = convergence(case, "nftables", tmp_path, check=False)
    assert done.changes == found.changes
    listed = run(["nft", "list", "ruleset"])
    assert "service-ips" not in listed and "service-frontends" in listed
    assert ("localhost-nodeport" in before) == later
    # kube-proxy removes or uses its counters when it returns; nothing refers to them meanwhile.
    assert len(re.findall(r"counter localhost-nodeport-\S+", listed)) == (6 if later else 0)
    assert convergence(case, "nftables", tmp_path, check=True).changes == ()
    assert convergence(case, "iptables", tmp_path, check=False).changed
    assert "localhost-nodeport" not in run(["nft", "list", "ruleset"])


# The layout that a draft for a later kube-proxy has: one map of endpoints for all Services, and chains that they share.
ONE_MAP = """
table ip kube-proxy {
    map endpoints-tcp {
        typeof ip daddr . tcp dport . numgen random mod 1 : ip daddr . tcp dport
        elements = { 10.96.20.1 . 80 . 0 : 10.244.1.11 . 8080 }
    }
    map service-ips {
        type ipv4_addr . inet_proto . inet_service : verdict
        elements = { 10.96.20.1 . tcp . 80 : goto lb-1-endpoints }
    }
    chain lb-1-endpoints {
        dnat ip addr . port to ip daddr . tcp dport . numgen random mod 1 map @endpoints-tcp
    }
    chain services { ip daddr . meta l4proto . th dport vmap @service-ips; }
    chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
}
"""


def test_nftables_mode_needs_no_program(tmp_path, monkeypatch):
    make_node()
    case = load_case(str(CASES / "nodeport-cluster"))
    load_recorded(case, "nftables", "", later=True)
    with monkeypatch.context() as changed:
        changed.setenv("PATH", str(tmp_path))
        assert convergence(case, "nftables", tmp_path, check=False).changed
    listed = run(["nft", "list", "ruleset"])
    assert "service-frontends" in listed and "service-ips" not in listed


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_a_table_of_kube_proxy_whose_layout_is_not_known_is_replaced_as_a_whole(tmp_path, mode):
    make_node()
    case = load_case(str(CASES / "nodeport-cluster"))
    run(["nft", "-f", "-"], ONE_MAP)
    found = convergence(case, mode, tmp_path, check=True)
    assert found.changes and "endpoints-tcp" in run(["nft", "list", "ruleset"])
    convergence(case, mode, tmp_path, check=False)
    listed = run(["nft", "list", "ruleset"])
    assert not re.search("endpoints-tcp|lb-1-endpoints|service-ips", listed)
    assert not convergence(case, mode, tmp_path, check=True).changes


@pytest.mark.parametrize(
    ("mode", "later"),
    [
        ("iptables", False),
        ("nftables", False),
        pytest.param("nftables", True, id="nftables-1.38"),
        pytest.param("ipvs", False, marks=pytest.mark.uml),
    ],
)
@pytest.mark.parametrize("name", ("nodeport-cluster", "affinity", "internal-local"))
def test_services_served_by_kube_proxy_count_for_the_loss_guard(tmp_path, monkeypatch, mode, later, name):
    """The guard counts the Services with endpoints in kube-proxy's tables before this proxy has programmed any."""
    case = load_case(str(CASES / name))
    make_node()
    load_recorded(case, mode, "legacy", later)
    for module in (cluster_state, loss):
        monkeypatch.setattr(module, "LOSS_MINIMUM", 1)
    objects = [item for item in case.snapshots()[0] if item.get("kind") != "EndpointSlice"]
    request = Request(
        ClusterState.from_objects(objects),
        load(case.proxy_configuration(mode, "", None)).configuration,
        case.node,
        whole_cluster=False,
        state_directory=str(tmp_path / "state"),
    )
    with pytest.raises(PreflightError, match=r"^(\d+) of the \1 Services that have endpoints on this node"):
        converge(request)
