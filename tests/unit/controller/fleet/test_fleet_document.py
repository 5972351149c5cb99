# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fleet report: records of nodes, exceptions, the document."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet import document as documents
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.document import (
    About,
    document,
    document_text,
    duration,
    make_report,
    one_sentence,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.kinds import STATES
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.nodes import (
    natural_key,
    read_node,
    read_nodes,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.page import page
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.sources import read_entries, read_previous
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.identity import collection_version
from tests.conftest import ROOT
from tests.fleet import samples

REACHED = {"ping": "pong"}


def good(name, agent=None, **changes):
    """Return a healthy node, with these changes of service_proxy_info's result and of its agent."""
    result = samples.healthy(random.Random(1), name)
    result.update({"refused": [], "refused_count": 0, "mode": "ipvs", **changes})
    result["agent"].update({"mode": result["mode"], **(agent or {})})
    return {"name": name, "results": [REACHED, {"skipped": True}, result]}


def report_of(*entries, **about):
    return make_report(read_nodes(list(entries)), About(generated=0.0, **about))


def kinds(report):
    return {found.kind: [(item.words, item.nodes) for item in found.items] for found in report.exceptions}


# -- records -----------------------------------------------------------------------------------------------------------


def test_the_first_failure_is_the_reason():
    unreachable = {"unreachable": True, "msg": "Task failed: no route\nto host"}
    node = read_node({"name": "a", "results": [unreachable, {"skipped": True}, {"skipped": True}]})
    assert (node.failure, node.message) == ("unreachable", "no route to host")
    node = read_node({"name": "a", "results": [REACHED, {"failed": True, "msg": "disk full"}, {"skipped": True}]})
    assert (node.failure, node.message) == ("failed", "disk full")
    failed = {"failed": True, "msg": "kube-proxy is running", "error_kind": "preflight", "kernel": "6.1.0"}
    node = read_node({"name": "a", "results": [REACHED, {}, failed]})
    assert (node.failure, node.error_kind, node.kernel) == ("failed", "preflight", "6.1.0")


@pytest.mark.parametrize("results", [[], None, [REACHED], [REACHED, {"skipped": True}], "nonsense", [3]])
def test_a_node_that_was_not_inspected_is_in_the_report(results):
    node = read_node({"name": "a", "results": results})
    assert (node.failure, node.message) == ("failed", "was not inspected: the play ended before")


@pytest.mark.parametrize("entry", [None, 7, "text", [], {}, {"name": {"a": 1}, "results": {"b": 2}}])
def test_an_invalid_entry_becomes_a_node_without_a_name(entry):
    assert read_node(entry).name == "(without a name)"


def test_services_that_a_node_does_not_reach_are_exceptions_by_service():
    reached = [{"service": "default/kubernetes", "reached": True, "reason": "", "probes": []}]
    unprobed = [{"service": "shop/stats", "reached": None, "reason": "it has no ready endpoint"}]
    failed = [{"service": "shop/web", "reached": False, "reason": "tcp://10.96.0.2:80: no answer within 2 seconds"}]
    found = report_of(
        good("a", traffic=[*reached, *unprobed]),
        good("b", traffic=[*reached, *failed]),
        good("c", traffic=[*reached, *failed]),
        good("d", traffic=[None, {"service": ["x"], "reached": False}, {"service": "odd", "reached": "no"}]),
        good("e"),
    )
    assert found.states == ("ok", "unreached", "unreached", "ok", "ok")
    assert kinds(found) == {"unreached": [("tcp://10.96.0.2:80: no answer within 2 seconds", ("b", "c"))]}
    assert one_sentence(found) == "5 nodes: 2 without a Service, 3 fine"
    nodes = document(found)["nodes"]
    assert nodes[1]["traffic"][0] == {"service": "default/kubernetes", "reached": True, "reason": ""}
    assert nodes[3]["traffic"] == [{"service": "odd", "reached": None, "reason": ""}] and nodes[4]["traffic"] == []


def test_values_of_another_type_count_as_absent():
    node = read_node(
        good(
            "a",
            mode=["ipvs"],
            counts={"services": "12", "endpoints": True, "service_ports": -1},
            drift="yes",
            changes=[None, {"table": 5, "added": "x"}],
            programmed={"sets": "many", "chains": 4},
            refused="all",
            cautions=[{"a": 1}, "one\nline", "one line"],
            families="IPv4",
        )
    )
    assert (node.mode, node.services, node.endpoints, node.service_ports, node.drift) == ("", None, None, None, None)
    assert (node.programmed, node.refused, node.warnings, node.families) == ({"chains": 4}, (), ("one line",), ())
    assert node.drift_entries == 0


def test_texts_are_one_printable_line_of_limited_length():
    node = read_node(good("a\u202eb\x1b[31m", summary="x" * 5000))
    assert node.name == "a?b?[31m"
    assert len(node.summary) == 1000 and node.summary.endswith("\u2026")


def test_nodes_come_in_natural_order_whatever_the_order_of_the_input():
    names = ["worker-10", "worker-9", "a", "10.0.0.2", "10.0.0.10", "worker-009", "9"]
    expected = ["9", "10.0.0.2", "10.0.0.10", "a", "worker-009", "worker-9", "worker-10"]
    for seed in range(5):
        random.Random(seed).shuffle(names)
        assert [node.name for node in read_nodes([{"name": name} for name in names])] == expected
    assert natural_key("9" * 5000) > natural_key("8")


# -- exceptions --------------------------------------------------------------------------------------------------------


def test_healthy_nodes_are_no_exceptions():
    report = report_of(good("a"), good("b"), engine=samples.ENGINE)
    assert (report.states, report.exceptions) == (("ok", "ok"), ())
    assert one_sentence(report) == "2 nodes: 2 fine"


def test_the_worst_exception_determines_the_state():
    entry = good("a", drift=True, summary="sets: 3 missing", agent={"healthy": False, "error": "no such set"})
    report = report_of(entry, good("b"))
    assert report.states == ("agent", "ok")
    assert kinds(report) == {
        "agent": [("is not healthy: no such set", ("a",))],
        "drifted": [("sets: 3 missing", ("a",))],
    }


def changed(table, added=0, replaced=0, removed=0, entries=()):
    return {"table": table, "added": added, "replaced": replaced, "removed": removed, "entries": list(entries)}


def test_drift_is_grouped_by_kind_and_the_most_harmful_comes_first():
    odd = [changed("IPv4 chains", replaced=1, entries=["nat KUBE-POSTROUTING (1 of 3 missing)"])]
    flushed = [changed("IPv4 chains", replaced=1, removed=2, entries=["nat KUBE-SERVICES (9 of 9 missing)", "x", "y"])]
    servers = [changed("IPv4 real servers", added=40, removed=1, entries=["10.0.0.1:80", "10.0.0.2:80"])]
    entries = [good(f"odd-{number}", drift=True, changes=odd) for number in range(5)]
    entries += [good("flushed", drift=True, changes=flushed), good("servers", drift=True, changes=servers), good("ok")]
    report = report_of(*entries)
    (drifted,) = report.exceptions
    assert drifted.nodes == 7
    assert [(item.subject, item.words, len(item.nodes)) for item in drifted.items] == [
        ("IPv4 chains", "1 emptied: nat KUBE-SERVICES", 1),
        ("IPv4 real servers", "40 missing: 10.0.0.1:80, 10.0.0.2:80, ...", 1),
        ("IPv4 chains", "5 different: nat KUBE-POSTROUTING (1 of 3 missing)", 5),
        ("IPv4 chains", "2 unexpected: x, y", 1),
        ("IPv4 real servers", "1 unexpected", 1),
    ]
    own = dict(zip((node.name for node in report.nodes), report.reasons))
    assert [f"{reason.subject}: {reason.words}" for reason in own["servers"]] == [
        "IPv4 real servers: 40 missing: 10.0.0.1:80, 10.0.0.2:80, ...",
        "IPv4 real servers: 1 unexpected",
    ]
    (change,) = document(report)["nodes"][0]["changes"]
    assert list(change["entries"]) == ["nat KUBE-SERVICES (9 of 9 missing)", "x", "y"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"running": False, "error": "agent.sock: refused"}, "does not answer: agent.sock: refused"),
        ({"healthy": False}, "is not healthy"),
        ({"api_server": {"nodes": "401 Unauthorized"}}, "does not follow nodes: 401 Unauthorized"),
        ({"version": samples.OLD_ENGINE}, "runs another engine than is installed: restart kubenode-proxy.service"),
        ({"mode": "nftables"}, "runs in mode nftables, but the node was compared with mode ipvs"),
    ],
)
def test_agents_in_trouble(changes, words):
    report = report_of(good("a", agent=changes), good("b"), good("c"))
    assert report.states == ("agent", "ok", "ok")
    assert kinds(report)["agent"] == [(words, ("a",))]


def test_a_drained_node_is_named():
    report = report_of(good("a", agent={"drained_until": "2026-11-23T04:20:35Z"}), good("b"))
    assert report.states == ("warned", "ok")
    assert kinds(report)["warned"] == [("is drained: load balancers leave it", ("a",))]
    assert "healthy, drained until 2026-11-23T04:20:35Z" in page(report)


def test_the_length_of_an_api_outage_is_on_the_node_and_not_in_its_reason():
    """Nodes that lose the API server one after the other remain one exception."""
    lost = {"services": "connection refused", "nodes": "watching"}
    entries = [
        good("a", agent={"api_server": lost, "api_server_lost_seconds": {"services": 30.5, "nodes": 0.0}}),
        good("b", agent={"api_server": lost, "api_server_lost_seconds": {"services": 7300, "nodes": 12.0, "x": 3}}),
        good("c", agent={"api_server": lost, "api_server_lost_seconds": {"services": "long", "nodes": -1}}),
    ]
    report = report_of(*entries)
    assert kinds(report)["agent"] == [("does not follow services: connection refused", ("a", "b", "c"))]
    found = [node["agent"]["lost_seconds"] for node in document(report)["nodes"]]
    assert found == [{"services": 30.5}, {"services": 7300.0}, {}]
    words = page(report)
    assert "healthy, disconnected from the API server for 30 s" in words and "for 2 h 1 min" in words


def test_a_last_sync_long_ago_is_stale():
    entries = [good("a", agent={"last_sync_age": 90000.0}), good("b", agent={"last_sync_age": None}), good("c")]
    report = report_of(*entries)
    assert report.states == ("stale", "stale", "ok")
    assert kinds(report)["stale"] == [("has not synced yet", ("b",)), ("last synced 25 h 0 min ago", ("a",))]
    assert report_of(*entries, stale_after=1e6).states == ("ok", "stale", "ok")


def test_what_no_run_keeps_up_to_date_is_stale():
    failing, booted = "scheduled runs fail, none has succeeded yet", "2026-11-30T10:00:00Z"
    report = report_of(good("a", schedule_failure=failing), good("b", booted_from=booted), good("c"))
    assert report.states == ("stale", "stale", "ok")
    words = f"has not converged since it booted with its state of {booted}"
    assert kinds(report)["stale"] == [(words, ("b",)), (failing, ("a",))]
    assert [node["booted_from"] for node in document(report)["nodes"]] == ["", booted, ""]


def test_nodes_unlike_the_majority_differ():
    entries = [
        good("a"),
        good("b"),
        good("c", mode="nftables"),
        good("d", agent_version="0.2.0+ffffffffffff", agent={"version": ""}),
    ]
    report = report_of(*entries)
    assert report.states == ("ok", "ok", "differs", "differs")
    assert kinds(report)["differs"] == [
        ("0.2.0+ffffffffffff, most nodes have 0.1.0+4be0c6d2c1b7", ("d",)),
        ("nftables, most nodes have ipvs", ("c",)),
    ]


def test_engines_are_compared_with_the_collection():
    report = report_of(good("a"), good("b"), engine="0.1.0+eeeeeeeeeeee")
    assert kinds(report)["differs"] == [("0.1.0+4be0c6d2c1b7, this collection has 0.1.0+eeeeeeeeeeee", ("a", "b"))]
    without = good("a", agent_version="")
    without["results"][2]["agent"] = {}
    assert report_of(without, engine="0.1.0+eeeeeeeeeeee").states == ("ok",)


def test_refused_objects_are_grouped_and_do_not_affect_the_state():
    one = {"kind": "Service", "namespace": "shop", "name": "a", "field": "spec.ports[0].port", "reason": "0 is no port"}
    two = {"kind": "Node", "namespace": "", "name": "n", "field": "", "reason": "no addresses"}
    report = report_of(good("a", refused=[one, two]), good("b", refused=[one]), good("c"))
    assert report.states == ("ok", "ok", "ok")
    (refused,) = report.exceptions
    assert [(item.subject, item.words, item.nodes) for item in refused.items] == [
        ("Service shop/a", "spec.ports[0].port: 0 is no port", ("a", "b")),
        ("Node n", "no addresses", ("a",)),
    ]


def test_pods_and_policies_without_each_other_are_listed_and_do_not_affect_the_state():
    first = {"unselected_pods": ["shop/a", 7], "unused_policies": ["shop/unused"]}
    second = {"unselected_pods": [f"bank/p{number}" for number in range(200)], "unused_policies": ["shop/unused"]}
    report = report_of(good("a", network_policy=first), good("b", network_policy=second), good("c", network_policy=[]))
    assert report.states == ("ok", "ok", "ok")
    (found,) = report.exceptions
    assert (found.kind, found.nodes) == ("policies", 2)
    assert (found.items[0].subject, found.items[0].words, found.items[0].nodes) == (
        "NetworkPolicy shop/unused",
        "selects no pod",
        ("a", "b"),
    )
    lines = {(item.subject, item.words, item.nodes) for item in found.items[1:]}
    assert ("Pod shop/a", "no NetworkPolicy selects it", ("a",)) in lines and len(lines) == 2 + 100
    shown = page(report)
    assert "pods that no network policy selects" in shown and "shop/unused" in shown
    assert document(report)["nodes"][0]["unselected_pods"] == ["shop/a", "7"]


def test_warnings_that_most_nodes_share_do_not_affect_the_state():
    entries = [good("a", cautions=["x", "y"]), good("b", cautions=["x"]), good("c", cautions=["x"])]
    report = report_of(*entries)
    assert report.states == ("warned", "ok", "ok")
    assert kinds(report)["warned"] == [("x", ("a", "b", "c")), ("y", ("a",))]


@pytest.mark.parametrize("count", [1, 2])
def test_another_service_proxy_is_no_warning_that_most_nodes_share(count):
    """Each reverts the changes of the other, so what was compared is not what serves a moment later."""
    runs = "kube-proxy runs on this node and would revert the changes: take over [kube-proxy]"
    report = report_of(*(good(name, cautions=[runs], other_proxies=[runs]) for name in ("a", "b")[:count]))
    assert set(report.states) == {"drifted"} and kinds(report)["drifted"] == [(runs, ("a", "b")[:count])]


def test_unreachable_nodes_do_not_count_for_majorities():
    gone = [{"name": f"gone-{number}", "results": [{"unreachable": True, "msg": "m"}]} for number in range(9)]
    report = report_of(*gone, good("a", cautions=["x"]), good("b", cautions=["x"]))
    assert Counter(report.states) == {"unreachable": 9, "ok": 2}
    assert report.exceptions[0].nodes == 9 and len(report.exceptions[0].items) == 1


def test_without_a_comparison_nothing_has_drifted():
    entry = good("a")
    result = entry["results"][2]
    for key in ("drift", "changes", "counts", "mode", "mode_reason", "refused", "refused_count", "summary"):
        del result[key]
    report = report_of(entry)
    assert report.states == ("ok",)
    assert document(report)["nodes"][0]["drift"] is None


# -- the document ------------------------------------------------------------------------------------------------------


def test_the_same_nodes_give_the_same_document_whatever_their_order():
    entries = samples.fleet(120)
    first = document_text(samples.report(entries))
    random.Random(3).shuffle(entries)
    assert document_text(samples.report(entries)) == first
    assert json.loads(first)["generated"] == "2026-06-21T00:00:00Z"


def test_the_summary_counts_every_node_once():
    found = document(samples.report(samples.fleet(400)))
    assert sum(found["summary"]["states"].values()) == len(found["nodes"]) == 400
    assert list(found["summary"]["states"]) == list(STATES)
    by_state = Counter(node["state"] for node in found["nodes"])
    assert {state: by_state[state] for state in STATES} == found["summary"]["states"]
    listed = {
        name
        for item in found["exceptions"]
        if item["kind"] != "refused"
        for each in item["items"]
        for name in each["nodes"]
    }
    assert {node["name"] for node in found["nodes"] if node["state"] != "ok"} <= listed


def _keys(value, path=""):
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{path}{key}"
            yield from _keys(item, f"{path}{key}.")
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item, path)


def test_the_documentation_names_every_field():
    found = document(samples.report(samples.fleet(400), samples.earlier(300)))
    open_ended = {"states", "modes", "engines", "kernels", "distributions", "programmed"}
    open_ended |= {"disconnected", "lost_seconds"}
    keys = {key for key in _keys(found) if not open_ended.intersection(key.split(".")[:-1])}
    text = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    written = set(re.findall(r"`([a-z_.]+)`", text))
    assert sorted(key for key in keys if key.split(".")[-1] not in written) == []
    assert f"`{documents.SCHEMA}`" in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7260, "2 h 1 min"), (190000, "2 d 4 h")],
)
def test_lengths_of_time(seconds, words):
    assert duration(seconds) == words


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_that_holds_no_results_is_refused(tmp_path):
    path = tmp_path / "nodes.json"
    for content, reason in (("{", "is not JSON"), ("{}", "must hold a list")):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigurationError, match=reason):
            read_entries(str(path))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_entries(str(tmp_path / "absent"))


def test_the_version_of_the_collection(tmp_path):
    engine = tmp_path / "plugins" / "module_utils"
    engine.mkdir(parents=True)
    assert collection_version(str(engine)) == ""
    (tmp_path / "galaxy.yml").write_text("namespace: x\nversion: 1.2.3-rc1\n", encoding="utf-8")
    assert collection_version(str(engine)) == "1.2.3-rc1"
    (tmp_path / "MANIFEST.json").write_text('{"collection_info": {"version": "2.0.0"}}', encoding="utf-8")
    assert collection_version(str(engine)) == "2.0.0"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", collection_version(str(ROOT / "plugins" / "module_utils")))


def test_only_a_report_is_an_earlier_report(tmp_path):
    path = tmp_path / "fleet-report.json"
    assert read_previous(str(path), documents.SCHEMA) is None
    for content, reason in (("{", "is not JSON"), ("[]", "is not a report"), ('{"schema": "x"}', "is not a report")):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigurationError, match=reason):
            read_previous(str(path), documents.SCHEMA)
    path.write_text(document_text(samples.report(samples.fleet(3))), encoding="utf-8")
    assert len(read_previous(str(path), documents.SCHEMA)["nodes"]) == 3
