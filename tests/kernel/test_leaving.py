# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Leaving a node: the usual tools print the same before and after, whichever programs have rules there.

Legacy tables of iptables cannot be deleted while their module is loaded, and kernel parameters are kept as they are,
except the one that would be dangerous; the tests check both separately.
"""

from __future__ import annotations

import difflib
import json
import re
import signal
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.conformance.wirelab.cases import load_case
from tests.kernel import external_rules
from tests.kernel.agent_node import AgentNode, endpoint_slice, service
from tests.kernel.convergence_node import cluster, has_ipvs, remove
from tests.kernel.external_rules import variants
from tests.lab import recorded
from tests.lab.system import run

UML = pytest.mark.uml
ROOT = Path(__file__).resolve().parents[2]
EXTERNAL_SERVER = "198.51.100.77"
MODES = [
    ("iptables", "legacy"),
    ("iptables", "nft"),
    ("nftables", "nft"),
    pytest.param("iptables", "legacy", marks=(UML, pytest.mark.full), id="iptables-uml"),
    pytest.param("ipvs", "legacy", marks=UML, id="ipvs-uml"),
]
#: Whether other programs have rules, too.
PROGRAMS = (pytest.param(False, marks=pytest.mark.full, id="alone"), pytest.param(True, id="among-others"))
#: Kernel parameters that keep the value a mode has set; the kernel changes others together with ip_forward.
STAY = re.compile(
    r"/net/ipv4/vs/|/net/ipv4/ip_forward |/net/ipv4/conf/[a-z0-9]+/(forwarding|accept_redirects) |/net/netfilter/"
    r"|/net/nf_conntrack_max |/net/ipv4/conf/all/arp_"
)
COUNTERS = re.compile(r"\[\d+:\d+\]|counter packets \d+ bytes \d+")
HANDLES = re.compile(r" # handle \d+| initval \w+")
EMPTY_TABLE = re.compile(r"\*\w+\n(?::[A-Z]+ ACCEPT \n)+COMMIT\n")


@pytest.fixture(autouse=True)
def separate_lock(tmp_path_factory, monkeypatch) -> None:
    """Provide a separate lock file for legacy iptables, since other tests hold the machine's."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path_factory.mktemp("lock") / "xtables.lock"))


def dumps() -> dict[str, list[str]]:
    """Return the output of each command, without counters, handles, timestamps in comments and device numbers."""
    found = {}
    for variant in variants():
        for program in ("iptables", "ip6tables"):
            text = "".join(f"{line}\n" for line in run([f"{program}-{variant}-save"]).splitlines() if line[:1] != "#")
            text = COUNTERS.sub("", text)
            found[f"{program}-{variant}-save"] = EMPTY_TABLE.sub("", text) if variant == "legacy" else text
    if external_rules.has_nftables():
        found["nft"] = HANDLES.sub("", COUNTERS.sub("", run(["nft", "-a", "list", "ruleset"])))
    if has_ipvs():
        found["ipvsadm"] = run(["ipvsadm", "-Sn"])
        found["ipset"] = HANDLES.sub("", run(["ipset", "save"]))
    for what in ("address", "link", "route"):
        found[what] = re.sub(r"^\d+: ", "", run(["ip", "-o", what]), flags=re.MULTILINE)
    return {command: text.splitlines() for command, text in found.items()}


def differing(before: dict[str, list[str]]) -> list[str]:
    """Return the lines in which the tools' output differs from before."""
    now = dumps()
    assert sorted(now) == sorted(before)
    return [
        f"{command}: {line}"
        for command, lines in before.items()
        for line in difflib.unified_diff(lines, now[command], lineterm="", n=0)
    ]


def parameters() -> dict[str, str]:
    """Return every kernel parameter of networking, by path and a space."""
    skipped = re.compile("count|expect|flush|sctp|random|stat")
    return {f"{path} ": value for path, value in external_rules.parameters(skipped).items()}


def add_other_programs(variant: str, kubelet: str = external_rules.KUBELET) -> None:
    """Add rules of the programs commonly found on a node, in the variant of iptables in use."""
    rules = (external_rules.UFW, kubelet, external_rules.DOCKER, external_rules.NETWORK_PLUGIN)
    external_rules.add(variant, *filter(None, rules))
    if has_ipvs():
        run(["ipvsadm", "-A", "-f", "7", "-s", "rr"])
        run(["ipvsadm", "-A", "-t", f"{EXTERNAL_SERVER}:443", "-s", "wlc"])
        run(["ipvsadm", "-a", "-t", f"{EXTERNAL_SERVER}:443", "-r", "192.0.2.9:6443", "-m"])
        run(["ipset", "create", "cali40masq-ipam-pools", "hash:net"])
        run(["ipset", "add", "cali40masq-ipam-pools", "10.244.0.0/16"])


def request(mode: str, directory: Path, variant: str) -> Request:
    """Return a request in a mode with every kind of Service; an external virtual server is excluded."""
    document = {
        "mode": mode,
        "nodePortAddresses": ["primary"],
        "ipvs": {"excludeCIDRs": [f"{EXTERNAL_SERVER}/32"], "strictARP": True, "tcpTimeout": "900s"},
    }
    return Request(
        cluster=cluster(),
        configuration=load(document).configuration,
        node_name="node-1",
        state_directory=str(directory / "state"),
        whole_cluster=False,
    )


def leave(directory: Path) -> Report:
    """Clean up after a check that must report exactly what is removed; a second cleanup then changes nothing."""
    checked = converge(
        Request(
            cluster(), load({}).configuration, state="absent", check=True, describe=True, state_directory="/nowhere"
        )
    )
    done = remove(directory / "state")
    described = {change.table: (change.added, change.replaced, change.removed) for change in checked.changes}
    assert {change.table: (change.added, change.replaced, change.removed) for change in done.changes} == described
    assert not remove(directory / "state").changed
    return done


@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize(("mode", "variant"), MODES)
def test_cleanup_restores_the_node(tmp_path, mode, variant, programs) -> None:
    if programs:
        add_other_programs(variant)
    before, values = dumps(), parameters()
    assert converge(request(mode, tmp_path, variant)).changed
    assert dumps() != before
    assert leave(tmp_path).changed
    assert differing(before) == []
    assert list(tmp_path.iterdir()) == []
    after = parameters()
    changed = [path for path, value in values.items() if after.get(path) != value and not STAY.search(path)]
    # kubelet's rule still protects loopback addresses.
    assert changed == (["/proc/sys/net/ipv4/conf/all/route_localnet "] if programs and mode == "iptables" else [])


@pytest.mark.parametrize(
    "modes",
    (
        pytest.param(("iptables", "nftables", "iptables"), id="iptables-nftables-iptables"),
        pytest.param(("nftables", "iptables", "nftables"), id="nftables-iptables-nftables"),
        pytest.param(("iptables", "ipvs"), marks=UML, id="iptables-ipvs"),
        pytest.param(("ipvs", "iptables"), marks=(UML, pytest.mark.full), id="ipvs-iptables"),
    ),
)
def test_cleanup_after_mode_switches_leaves_nothing(tmp_path, modes) -> None:
    variant = variants()[-1]
    add_other_programs(variant)
    before = dumps()
    for mode in modes:
        assert converge(request(mode, tmp_path, variant)).changed
    leave(tmp_path)
    assert differing(before) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize(
    ("modes", "variant"),
    [
        (("iptables",), "legacy"),
        (("iptables",), "nft"),
        (("nftables",), "nft"),
        (("iptables", "nftables"), "nft"),
        pytest.param(("ipvs",), "legacy", marks=(UML, pytest.mark.full), id="ipvs-uml"),
        pytest.param(("iptables", "ipvs"), "legacy", marks=UML, id="iptables-ipvs-uml"),
    ],
)
def test_cleanup_removes_everything_of_kube_proxy(tmp_path, modes, variant, programs) -> None:
    """Clean up what kube-proxy had programmed when a case was recorded, in one mode, or in two after a switch.

    Without kubelet, since its shared chain would be added a second time.
    """
    if programs:
        add_other_programs(variant, kubelet="")
        for program in ("iptables", "ip6tables"):
            # The recordings name this chain, so loading them creates it, which kube-proxy does not.
            run([f"{program}-{variant}", "-t", "nat", "-P", "INPUT", "ACCEPT"])
    before = dumps()
    case = load_case(str(ROOT / "tests" / "conformance" / "cases" / "nodeport-cluster"))
    for mode in modes:
        state = Path(case.file(f"state-{mode}.txt"))
        recorded.load(state, lambda command, text=None: run([*command], stdin=text), variant)
    assert dumps() != before
    leave(tmp_path)
    assert differing(before) == []


def test_cleanup_after_a_killed_agent(tmp_path) -> None:
    """The agent's socket and lock file are removed as well; a lock held by a running agent is respected."""
    add_other_programs("nft")
    before = dumps()
    node = AgentNode(tmp_path, "nftables")
    node.store.put(service(1))
    node.store.put(endpoint_slice(1))
    cleaning = ("cleanup", "--state-directory", str(tmp_path / "run"), "--lock-timeout", "0.2", "-o", "json")
    try:
        node.start()
        refused = node.run(*cleaning)
        assert refused.returncode == 1 and "the agent (kubenode-proxy run)" in refused.stderr
        assert (tmp_path / "run" / "lock").exists() and node.differences()["changed"] is False
        node.stop(signal.SIGKILL)
        (tmp_path / "run" / "agent").mkdir()
        (tmp_path / "run" / "agent" / "agent.sock").touch()
        done = node.run(*cleaning)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["changed"] is True
    finally:
        node.close()
    assert differing(before) == []
    assert not (tmp_path / "run").exists()


def test_a_table_that_another_program_uses_is_kept(tmp_path) -> None:
    """A policy, a set and a rule each keep a table; built-in chains that only our rules used are removed from it."""
    run(["iptables-nft", "-t", "filter", "-P", "FORWARD", "DROP"])
    run(["nft", "add", "table", "ip", "mangle"])
    run(["nft", "add", "set", "ip", "mangle", "kept", "{ type ipv4_addr; }"])
    run(["ip6tables-nft", "-t", "nat", "-A", "POSTROUTING", "-j", "ACCEPT"])
    run(["ip6tables-nft", "-t", "filter", "-N", "OTHERS"])
    before = dumps()
    converge(request("iptables", tmp_path, "nft"))
    leave(tmp_path)
    assert differing(before) == []


def test_an_empty_table_of_another_program_is_kept(tmp_path) -> None:
    for mode in ("nftables", "iptables"):
        run(["iptables-nft", "-t", "raw", "-P", "OUTPUT", "ACCEPT"])
        run(["nft", "add", "table", "ip", "security"])
        before = dumps()
        converge(request(mode, tmp_path, "nft"))
        leave(tmp_path)
        assert differing(before) == [], mode


def test_cleanup_does_not_expose_loopback(tmp_path) -> None:
    """route_localnet stays enabled only while the rule that makes it safe exists."""
    parameter = Path("/proc/sys/net/ipv4/conf/all/route_localnet")
    for mode in ("absent", "nftables"):
        assert parameter.read_text().strip() == "0"
        converge(request("iptables", tmp_path, "nft"))
        assert parameter.read_text().strip() == "1" and "block incoming localnet" in run(["iptables-save"])
        if mode == "absent":
            leave(tmp_path)
        else:
            converge(request(mode, tmp_path, "nft"))
        assert parameter.read_text().strip() == "0" and "block incoming localnet" not in run(["iptables-save"])
    leave(tmp_path)
    external_rules.restore("nft", external_rules.KUBELET)
    converge(request("iptables", tmp_path, "nft"))
    leave(tmp_path)
    assert parameter.read_text().strip() == "1" and "block incoming localnet" in run(["iptables-save"])
