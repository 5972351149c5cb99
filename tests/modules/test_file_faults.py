# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A disk that is read-only, full or broken under any file that a command or a module writes.

Which files these are, and how often a program makes them durable, is taken from a run without faults. Then there is one
run for each fault: it succeeds or names the file and the reason on one line, leaves each file and the rules of the
kernel old or new, and once the fault has ended, another run completes the change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

import pytest

from tests.lab.cluster import SNAPSHOT
from tests.lab.faulty_disk import CALLS, FULL, READ_ONLY
from tests.lab.namespaces import ROOT
from tests.modules.file_faults import (
    CONFIGURATION,
    DOCUMENT,
    NODE,
    PLACES,
    Fault,
    FaultyNode,
    Files,
    changed,
    command,
    is_whole,
    module,
)

SERVE = module("service_proxy", snapshot=str(SNAPSHOT), node_name=NODE, mode="nftables", configuration=CONFIGURATION)
CONVERGE = command(
    *("converge", "--snapshot", str(SNAPSHOT), "--node-name", NODE),
    *("--mode", "nftables", "--config", "/run/config.json"),
)
ROLLBACK = command("rollback", "--accept-loss")
VALUES = {"values": {"net.ipv4.ip_forward": 1}, "persistent_file": "/etc/sysctl.d/50-web.conf"}
KUBELET = "/etc/kubernetes/kubelet.conf"
CLUSTER = {"name": "one", "cluster": {"server": "https://198.18.0.1"}}
KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "one",
    "clusters": [CLUSTER],
    "contexts": [{"name": "one", "context": {"cluster": "one"}}],
}
POINTED = {
    "path": KUBELET,
    "before": "https://192.0.2.7:6443",
    "written": "https://198.18.0.1",
    "backup": f"{KUBELET}.before-kubenode-proxy",
}


class Row(NamedTuple):
    """A program: its command line, those that run before it, and the files that exist before them.

    ``removes``: it only removes, so it succeeds on a full disk.
    """

    argv: Sequence[str]
    before: Sequence[Sequence[str]] = ()
    files: dict[str, Any] = {}
    removes: bool = False


CONFIGURED = {"/run/config.json": DOCUMENT}
ROWS = {
    "kubelet_kubeconfig absent": Row(
        module("kubelet_kubeconfig", state="absent"),
        files={
            KUBELET: KUBECONFIG,
            POINTED["backup"]: KUBECONFIG,
            "/var/lib/kubenode-proxy/kubelet.json": POINTED,
        },
    ),
    "sysctls absent": Row(
        module("sysctls", state="absent", persistent_file=VALUES["persistent_file"]),
        [module("sysctls", **VALUES)],
        removes=True,
    ),
    "sysctls": Row(module("sysctls", **VALUES)),
    "kernel_modules": Row(
        module("kernel_modules", modules=["nf-conntrack"], persistent_file="/etc/modules-load.d/web.conf")
    ),
    "cluster_snapshot": Row(
        module("cluster_snapshot", source_file=str(SNAPSHOT), snapshot_file="/var/lib/state.json.gz")
    ),
    "agent_archive": Row(
        module("agent_archive", source=str(ROOT / "plugins" / "module_utils"), path="/var/lib/kubenode-proxy.pyz")
    ),
    "service_proxy": Row(SERVE),
    "service_proxy absent": Row(module("service_proxy", state="absent"), [SERVE], removes=True),
    "service_proxy_rollback": Row(module("service_proxy_rollback", accept_loss=True), [SERVE]),
    "converge": Row(CONVERGE, files=CONFIGURED),
    "converge again": Row(CONVERGE, [CONVERGE, command("cleanup")], CONFIGURED),
    "cleanup": Row(command("cleanup"), [CONVERGE], CONFIGURED, removes=True),
    "rollback": Row(ROLLBACK, [CONVERGE], CONFIGURED),
}
KINDS = (READ_ONLY, FULL, *CALLS)
#: One kind of fault for two rows. All take minutes.
QUICK = [("kubelet_kubeconfig absent", (READ_ONLY,)), ("sysctls absent", (FULL,))]


class State(NamedTuple):
    """The files of a node, and its rules."""

    files: Files
    rules: str

    @classmethod
    def of(cls, node: FaultyNode) -> State:
        """Return the present state."""
        return cls(node.files(), node.rules())


class Sweep:
    """Makes a node for each run of a row."""

    def __init__(self, row: Row, scratch: Path) -> None:
        self.row = row
        self.scratch = scratch
        self.nodes = 0

    def node(self) -> FaultyNode:
        """Return a node on which the row can run."""
        self.nodes += 1
        scratch = self.scratch / str(self.nodes)
        scratch.mkdir()
        node = FaultyNode(scratch)
        for path, document in self.row.files.items():
            node.shell(f"mkdir -p {os.path.dirname(path)}; cat >{path} <<'END'\n{json.dumps(document)}\nEND")
        for argv in self.row.before:
            outcome = node.run(argv)
            assert outcome.ok, outcome
        return node

    def faults(self, kinds: Sequence[str], before: Files, after: Files) -> Iterator[Fault]:
        """Yield each fault of these kinds that can affect what a run without faults has written."""
        existing = {os.path.dirname(path) for path in before} | set(PLACES)
        for directory in {os.path.dirname(path) for path in changed(before, after)}:
            while directory not in existing:
                directory = os.path.dirname(directory)
            yield from (Fault(kind, directory) for kind in kinds if kind not in CALLS)
        for kind in CALLS.keys() & set(kinds):
            node = self.node()
            calls = node.calls(self.row.argv, kind)
            node.close()
            yield from (Fault(kind, str(number)) for number in range(1, calls + 1))

    def defects(self, fault: Fault, before: State, after: State) -> list[str]:
        """Run the row during a fault and once more after it; return what is wrong."""
        node = self.node()
        outcome = node.suffer(self.row.argv, fault)
        now = State.of(node)
        found = [f"{path} is not whole" for path, written in now.files.items() if not is_whole(path, written)]
        if not outcome.ok and ("\n" in outcome.said or fault.reason not in outcome.said or "/" not in outcome.said):
            found.append(f"it says: {outcome.said}")
        if self.row.removes and fault.kind == FULL and not outcome.ok:
            found.append(f"it needs room to remove something: {outcome.said}")
        if now.rules not in (before.rules, after.rules):
            found.append("its rules are half old and half new")
        again = node.run(self.row.argv)
        if not again.ok:
            found.append(f"the next run says: {again.said}")
        end = State.of(node)
        # States of the history are not saved twice.
        missing = {path for path in after.files if "/state-" not in path} - end.files.keys()
        found += [f"{path} is missing" for path in missing]
        found += [f"{path} is left" for path in end.files.keys() - after.files.keys() if "/state-" not in path]
        if end.rules != after.rules:
            found.append("the next run makes other rules")
        node.close()
        return [f"{fault.kind} {fault.where}: {each}" for each in found]


@pytest.mark.parametrize(
    ("name", "kinds"), [*QUICK, *(pytest.param(name, KINDS, marks=pytest.mark.full) for name in ROWS)]
)
def test_a_run_on_a_faulty_disk_leaves_all_old_or_new_and_the_next_one_completes_it(
    name: str, kinds: Sequence[str], tmp_path: Path
) -> None:
    sweep = Sweep(ROWS[name], tmp_path)
    node = sweep.node()
    before = State.of(node)
    outcome = node.run(sweep.row.argv)
    assert outcome.ok, outcome
    after = State.of(node)
    node.close()
    faults = sorted(set(sweep.faults(kinds, before.files, after.files)))
    assert faults
    assert [defect for fault in faults for defect in sweep.defects(fault, before, after)] == []
