# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of kube-proxy's gates, flags, fields and metrics agrees with this project, and with a kube-proxy if any.

KUBERNETES_SOURCE and KUBE_PROXY in the environment name a source tree and a program.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.metric_tables import TABLES, declared
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration import gate_table
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import KUBE_PROXY_RELEASE
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.fields import FIELDS
from tests.conftest import ROOT
from tests.parity import facts, surface
from tests.parity.sources import Gate, Metric, of_binary, of_tree

TABLE = surface.table(KUBE_PROXY_RELEASE)
TREE, PROGRAM = (os.environ.get(name, "") for name in ("KUBERNETES_SOURCE", "KUBE_PROXY"))
#: Fields of the mode none and of Windows are one row each; the mode itself has more values here.
BLOCKS = ("winkernel", "logging.options")
#: Flags of other components, which the program has as well.
OTHERS = {"boot-id-file", "help", "machine-id-file"}


def test_the_gates_of_the_node_are_those_of_the_table() -> None:
    assert (ROOT / surface.GATES_MODULE).read_text(encoding="utf-8") == surface.gates_module(KUBE_PROXY_RELEASE)
    assert {name: Gate(*gate) for name, gate in gate_table.GATES.items()} == TABLE.gates
    assert not set(gate_table.REMOVED) & set(TABLE.gates)


def test_the_fields_are_those_of_the_table() -> None:
    def row(name: str) -> str:
        return next((block for block in BLOCKS if name.startswith(f"{block}.")), name)

    assert {row(name) for name in TABLE.fields} == {field.name for field in FIELDS}


def test_the_metrics_are_those_of_the_table() -> None:
    ours = {
        metric.name: Metric(metric.kind.value, metric.labels)
        for rows in TABLES
        for metric in declared(rows).values()
        if metric.name.startswith("kubeproxy_")
    }
    absent = surface.later()["absent_metrics"]
    assert ours == {name: metric for name, metric in (TABLE.metrics or {}).items() if name not in absent}
    assert set(absent) <= set(TABLE.metrics or {})


def test_every_flag_is_in_the_page_of_flags() -> None:
    page = (ROOT / "docs" / "distributions.md").read_text(encoding="utf-8")
    shown = re.findall(r"`--([a-z0-9-]+)(\*?)`", page)
    missing = {name for name in TABLE.flags if (name, "") not in shown} - OTHERS
    assert {name for name in missing if not any(name.startswith(start) for start, more in shown if more)} == set()


def test_every_later_fact_names_its_source_and_tests_that_exist() -> None:
    assert surface.later()["mark"] == "by reading"
    rows = [fact for topic in facts.facts().values() for fact in topic]
    assert all(re.fullmatch(r"1\.\d+|v1(alpha|beta)\d|draft|any", fact.since) for fact in rows)
    assert all(fact.source and fact.seen and fact.here and fact.tests for fact in rows)
    wrong = {f"{test}: {facts.missing(test)}" for fact in rows for test in fact.tests if facts.missing(test)}
    assert wrong == set()


def test_the_page_of_later_facts_names_only_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[^`]+::[^`]+)`", facts.page())
    assert named and [test for test in named if facts.missing(test)] == []
    assert facts.missing("tests/unit/parity/test_surface.py::test_that_was_renamed") == "no such test"
    assert facts.missing("tests/unit/parity/nowhere.py::test_x") == "no such file"
    assert facts.missing("case nowhere") == "no such case"


def test_a_later_fact_holds_from_its_release_on() -> None:
    name = "KubeProxyNFTablesLocalhostNodePorts"
    found = [surface.table(release).gates.get(name) for release in ("1.36", "1.37", "1.38", "1.40")]
    assert found == [None, Gate(False, "ALPHA"), Gate(True, "BETA"), Gate(True, "BETA")]


def test_what_a_kube_proxy_has_more_or_less_is_named() -> None:
    same = surface.recorded()
    assert surface.differences(same) == []
    metrics = dict(same.metrics or {})
    metrics["kubeproxy_new_total"] = metrics.pop("kubeproxy_proxy_livez_total")
    gates = {**same.gates, "NFTablesProxyMode": Gate(False), "NewGate": Gate(True)}
    changed = same._replace(gates=gates, metrics=metrics, flags=[*same.flags, "new"], fields=same.fields[1:])
    assert surface.differences(changed) == [
        "gate NewGate: not in the table",
        f"gate NFTablesProxyMode: {Gate(False)} in kube-proxy, {Gate(True, '', True)} in the table",
        "flag --new: not in the table",
        f"field {same.fields[0]}: not in kube-proxy 1.36",
        "metric kubeproxy_proxy_livez_total: not in kube-proxy 1.36",
        "metric kubeproxy_new_total: not in the table",
    ]


@pytest.mark.skipif(not TREE, reason="KUBERNETES_SOURCE names no source tree of Kubernetes")
def test_a_source_tree_has_what_the_table_says() -> None:
    assert surface.differences(of_tree(Path(TREE))) == []
    text = (Path(TREE) / "pkg/features/kube_features.go").read_text(encoding="utf-8")
    assert [name for name in gate_table.REMOVED if re.search(rf"\b{name}\b", text)] == []


@pytest.mark.skipif(not PROGRAM, reason="KUBE_PROXY names no program")
def test_a_program_has_what_the_table_says() -> None:
    assert surface.differences(of_binary(Path(PROGRAM)), Path(PROGRAM)) == []
