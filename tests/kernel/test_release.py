# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Returning a node to kube-proxy in nftables mode: exactly those objects are removed that kube-proxy does not use.

A convergence adopts a table that a real kube-proxy has programmed; then kube-proxy programs it again: in one
transaction it flushes and fills the chains and sets that it knows, and does not change the others.
"""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path
from typing import Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.own_names import is_own
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.conformance.wirelab.cases import Case, load_case
from tests.kernel.convergence_node import request
from tests.kernel.test_migration_adopt import CASES, convergence, make_node
from tests.kernel.test_migration_playbook import CASE, Cluster, Node
from tests.lab import recorded
from tests.lab.later_tables import as_1_38
from tests.lab.system import run

NAMES = ("affinity", "lb-source-ranges", "many-endpoints", "nodeport-cluster", "terminating-local")
TABLE = re.compile(r"^table (ip6?) kube-proxy \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
NODE_STATE = Path(CASE.file("state-nftables.txt"))
OBJECT = re.compile(r"^\t(set|map|chain) (\S+) \{\n(.*?)^\t\}", re.MULTILINE | re.DOTALL)
COUNTER = re.compile(r"^\tcounter (\S+) \{", re.MULTILINE)


def kube_proxy_syncs(case: Case, execute: recorded.Run = run, later: bool = False) -> None:
    """Program the node as a starting kube-proxy does: flush and refill everything it knows, in one transaction."""
    (block,) = recorded.blocks(Path(case.file("state-nftables.txt")), 0)
    tables = as_1_38(block.text) if later else block.text
    script = []
    for family, body in TABLE.findall(tables):
        script.append(f"add table {family} kube-proxy")
        script += [f"add counter {family} kube-proxy {name}" for name in COUNTER.findall(body)]
        for kind, name, text in OBJECT.findall(body):
            definition = [line.strip() for line in text.splitlines() if not line.strip().startswith("comment")]
            kept = [line for line in definition if line.startswith(("type ", "flags ", "timeout ", "policy "))]
            script.append(
                f"add {kind} {family} kube-proxy {name} {{ {'; '.join(kept)}; }}"
                if kept
                else f"add {kind} {family} kube-proxy {name}"
            )
            script.append(f"flush {kind} {family} kube-proxy {name}")
    execute(["nft", "-f", "-"], "\n".join(script) + "\n" + tables)


def objects(execute: recorded.Run = run) -> dict[str, dict[str, str]]:
    """Return what nft shows of both tables by family, kind and name: sorted words of sets, lines of chains."""
    found: dict[str, dict[str, str]] = {}
    for family, body in TABLE.findall(execute(["nft", "-s", "list", "ruleset"], None)):
        found[family] = {}
        for kind, name, text in OBJECT.findall(body):
            lines = [line.strip() for line in text.splitlines() if not line.strip().startswith("comment")]
            found[family][f"{kind} {name}"] = (
                "\n".join(lines) if kind == "chain" else " ".join(sorted(" ".join(lines).replace(",", " ").split()))
            )
    return found


def names(found: dict[str, dict[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the kind and name of each object of both families."""
    for family in found.values():
        for item in family:
            kind, _space, name = item.partition(" ")
            yield kind, name


def released(directory: Path, check: bool = False) -> Report:
    return converge(request("nftables", directory, state="handed_over", check=check, describe=True))


@pytest.mark.parametrize("later", [False, True], ids=["1.36", "1.38"])
@pytest.mark.parametrize("name", NAMES)
def test_objects_that_kube_proxy_does_not_use_are_removed_and_the_rest_is_kube_proxys(tmp_path, name, later):
    make_node()
    case = load_case(str(CASES / name))
    recorded.load(Path(case.file("state-nftables.txt")), run, "", later=later)
    before = objects()
    own_names = {name for kind, name in names(before) if is_own("set" if kind == "map" else kind, name)}
    assert own_names == ({"localhost-nodeport-reject-ports"} if later else set())
    counting = {"traffic": {"countConnections": True, "countBytes": True}} if name == "nodeport-cluster" else {}
    assert convergence(case, "nftables", tmp_path, check=False, **counting).changed
    for check in (True, False):
        with pytest.raises(KernelError, match="kube-proxy has not taken it over yet"):
            released(tmp_path, check)
    kube_proxy_syncs(case, later=later)
    after = objects()
    left = {family: set(after[family]) - set(before[family]) for family in before}
    assert all("map service-frontends" in items for items in left.values())
    assert all(("set service-traffic" in items) == bool(counting) for items in left.values())
    checked = released(tmp_path, check=True)
    assert objects() == after and checked.changed
    shown = {line.split()[1] for change in checked.changes for line in change.before if line[:1] not in ("\t", "}")}
    # Sets with kube-proxy's own names for session affinity are left for kube-proxy to remove.
    own = {item.split()[1] for items in left.values() for item in items if "/" not in item}
    assert own <= shown | {"nodeport-ips"} and "service-frontends" in shown
    done = released(tmp_path)
    assert [change._replace(before=()) for change in done.changes] == [
        change._replace(before=()) for change in checked.changes
    ]
    final = objects()
    for family in before:
        assert {item for item in final[family] if "/" not in item} - {"set nodeport-ips"} == {
            item for item in before[family] if "/" not in item
        } - {"set nodeport-ips"}
        assert {item: text for item, text in final[family].items() if item in before[family]} == before[family]
    assert not released(tmp_path).changed


def test_referenced_objects_are_kept(tmp_path):
    make_node()
    case = load_case(str(CASES / "lb-source-ranges"))
    assert convergence(case, "nftables", tmp_path, check=False).changed
    kube_proxy_syncs(case)
    chains = {item.split()[1] for item in objects()["ip"] if item.startswith("chain ")}
    chooser = min(name for name in chains if re.fullmatch(r"cluster-\d+", name))
    script = (
        "add chain ip kube-proxy kept-by-hand; add rule ip kube-proxy kept-by-hand "
        f"ip daddr . meta l4proto . th dport vmap {{ 192.0.2.1 . tcp . 80 : goto {chooser} }}"
    )
    run(["nft", script])
    before = objects()
    assert released(tmp_path).changed
    after = objects()["ip"]
    assert f"chain {chooser}" in after and "map service-endpoints" in after and "chain kept-by-hand" in after
    assert "map service-frontends" not in after and set(after) < set(before["ip"])
    assert not released(tmp_path).changed


def test_release_without_a_table_changes_nothing(tmp_path):
    assert not released(tmp_path).changed
    run(["nft", "add table ip other"])
    assert not released(tmp_path, check=True).changed
    assert subprocess.run(["nft", "list", "table", "ip", "other"], capture_output=True, check=False).returncode == 0


class NodeOfKubeProxy(Node):
    """A node whose kube-proxy programs it only seconds after its pod is ready, as one with many Services does."""

    def __init__(self, scratch: Path) -> None:
        self.timer = threading.Timer(0.0, print)
        super().__init__("node-a", scratch, NODE_STATE)

    def set_kube_proxy(self, wanted: bool) -> None:
        returns = wanted and "kube-proxy" not in self.processes
        super().set_kube_proxy(wanted)
        if returns:
            self.timer = threading.Timer(15.0, kube_proxy_syncs, (CASE, self.run))
            self.timer.start()

    def close(self) -> None:
        self.timer.cancel()
        super().close()


@pytest.mark.full
def test_the_playbook_returns_a_node_as_kube_proxy_had_programmed_it(tmp_path):
    node = NodeOfKubeProxy(tmp_path)
    node.timer.cancel()
    cluster = Cluster(tmp_path, [node], "nftables")
    try:
        node.timer.join()
        before = objects(node.run)
        status, text = cluster.migrate()
        assert status == 0, text
        assert "map service-frontends" in objects(node.run)["ip"] and cluster.with_kube_proxy() == []
        status, text = cluster.migrate("-e", "migrate_direction=back")
        assert status == 0, text
        assert objects(node.run) == before and cluster.with_kube_proxy() == ["node-a"]
    finally:
        cluster.close()
