# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What counts as drift beside a running agent: its own comparison decides about tables of the cluster, if it can."""

from __future__ import annotations

import json
from typing import Any, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import Failing, NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.agent_comparison import (
    AgentComparison,
    comparison_document,
    parse_comparison,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request, TableChange
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.agent_client import NoAgent
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.settings_digest import settings_digest
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support import inspection
from tests.lab import manifests

WEB = NamespacedName("default", "web")
FAILING = Failing({("10.244.1.1", 8080): "refused", ("10.244.1.2", 0): "timeout"}, 50.0)
CHAINS = TableChange("IPv4 chains", 1, 2, 3, ("-A old",), ("-A new",), ("nat KUBE-SERVICES",), of_cluster=True)
OWN = TableChange("IPv4 chains", 0, 1, 0, entries=("nat KUBE-SVC-A",), of_cluster=True)
SYSCTLS = TableChange("kernel parameters", 0, 1, 0)


def request() -> Request:
    cluster = ClusterState.from_objects([manifests.service("web", "10.96.0.1", [manifests.port(80)])])
    configuration, _warnings = load({"mode": "nftables"}, "", None)
    return Request(cluster=cluster, configuration=configuration, node_name="node1")


def digest(asked: Request) -> str:
    return settings_digest(asked.configuration, "", "node1", ("IPv4",), asked.cluster)


def report(*changes: TableChange) -> Report:
    counted = {"services": 1, "added": 9, "replaced": 9, "removed": 9}
    return Report("nftables", "", "node1", ("IPv4",), "", bool(changes), changes, counted, {}, (), (), {})


@pytest.fixture
def inspected(monkeypatch):
    """Provide a function that inspects with these changes and answers; it returns the result and the kernel reads."""

    def run(changes: Sequence[TableChange], *answers: Any) -> tuple[inspection.Inspection, list[bool], Request]:
        left, reads, asked = list(answers), [], request()

        def ask(_path: str, kernel: bool, describe: bool = False) -> AgentComparison:
            reads.append(kernel)
            answer = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(inspection, "ask_comparison", ask)
        monkeypatch.setattr(inspection, "inspect", lambda _request: report(*changes))
        return inspection.inspect_beside_agent(asked, lambda _seconds: None), reads, asked

    return run


def agent(**fields: Any) -> AgentComparison:
    return AgentComparison(**{"obstacle": "", "settings": digest(request()), "changes": (), **fields})


def test_differences_that_the_agent_does_not_find_are_changes_of_the_cluster(inspected):
    found, reads, _asked = inspected([SYSCTLS, CHAINS], agent(excluded=2))
    assert found.report.changes == (SYSCTLS,) and found.report.changed
    assert found.newer == (CHAINS,) and found.excluded == 2 and not found.problem
    assert found.report.counts == {"services": 1, "added": 0, "replaced": 1, "removed": 0}
    assert reads == [False, True]
    found, _reads, _asked = inspected([CHAINS], agent())
    assert not found.report.changed


def test_what_the_agent_finds_as_well_is_drift(inspected):
    found, reads, _asked = inspected([CHAINS], agent(changes=(OWN,)))
    assert found.report.changes == (OWN,) and found.report.changed
    assert reads == [False] + [True] * inspection.ATTEMPTS


def test_an_agent_that_is_about_to_sync_is_asked_again(inspected):
    found, reads, _asked = inspected([CHAINS], agent(), agent(changes=(OWN,)), agent())
    assert not found.report.changed and reads == [False, True, True]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (NoAgent("none"), ""),
        (ProxyError("unknown command 'comparison'"), "unknown command 'comparison'"),
        (agent(obstacle="the agent does not follow the API server"), "the agent does not follow the API server"),
        (agent(settings="other"), "the agent has other settings than those that were given, or is of another version"),
    ],
)
def test_an_agent_that_cannot_judge_leaves_the_differences_as_they_are(inspected, answer, problem):
    found, _reads, _asked = inspected([SYSCTLS, CHAINS], answer)
    assert found.report.changes == (SYSCTLS, CHAINS) and not found.newer
    assert found.problem == problem


def test_an_agent_that_opens_a_watch_again_is_asked_again(inspected):
    away = agent(obstacle="the agent does not follow the API server")
    found, reads, _asked = inspected([CHAINS], away, away, agent())
    assert not found.report.changed and not found.problem and reads == [False, True, True]


def test_an_agent_that_ends_meanwhile_explains_nothing(inspected):
    found, _reads, _asked = inspected([CHAINS], agent(), NoAgent("gone"))
    assert found.report.changes == (CHAINS,) and not found.newer


def test_without_differences_of_the_cluster_the_agent_reads_nothing(inspected):
    found, reads, _asked = inspected([SYSCTLS], agent(obstacle="whatever"))
    assert found.report.changes == (SYSCTLS,) and reads == [False] and not found.problem


def test_the_results_of_health_checks_are_those_of_the_agent(inspected):
    other = NamespacedName("default", "deleted")
    _found, _reads, asked = inspected(
        [], agent(failing={WEB: FAILING, other: FAILING}, rising={WEB: {("10.244.1.1", 8080): 3}}, excluded=1)
    )
    assert asked.cluster.failing(WEB) == FAILING and asked.cluster.failing(other) is None
    assert asked.cluster.rising(WEB) == {("10.244.1.1", 8080): 3}


def test_an_answer_arrives_as_it_was_sent():
    sent = agent(failing={WEB: FAILING}, rising={WEB: {("fd00::1", 80): 1}}, excluded=1, changes=(CHAINS,))
    assert parse_comparison(json.loads(json.dumps(comparison_document(sent)))) == sent
    sent = sent._replace(changes=None)
    assert parse_comparison(json.loads(json.dumps(comparison_document(sent)))) == sent


@pytest.mark.parametrize(
    "change",
    [
        {"failing": [["default", "web", 0, [["10.244.01.1", 80, ""]]]]},
        {"failing": 5},
        {"rising": [["default"]]},
        {"excluded": "many"},
        {"changes": [["IPv4 chains", 1]]},
    ],
)
def test_an_answer_of_another_form_is_refused(change):
    with pytest.raises(ProxyError, match="not valid"):
        parse_comparison({**comparison_document(agent()), **change})
    with pytest.raises(ProxyError, match="not valid"):
        parse_comparison({})


def test_the_digest_is_about_what_is_programmed():
    asked = request()
    own = asked.configuration
    of_agent = own._replace(metrics_bind_address="127.0.0.1:1", healthz_bind_address="", oom_score_adj=1)
    assert settings_digest(of_agent, "", "node1", ("IPv4",), asked.cluster) == digest(asked)
    for other in (own._replace(mode="iptables"), own._replace(cluster_cidrs=("10.0.0.0/8",))):
        assert settings_digest(other, "", "node1", ("IPv4",), asked.cluster) != digest(asked)
    assert settings_digest(own, "", "node2", ("IPv4",), asked.cluster) != digest(asked)
