# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Alert rules and dashboard use only exported metrics, and are valid for Prometheus and Grafana."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.monitoring import expressions
from tests.monitoring.expressions import dashboard_expressions, exported, exported_on_request, metrics_of, panels, rules

# Prometheus itself creates this one.
OF_PROMETHEUS = {"up"}


@pytest.mark.parametrize(
    ("expression", "metrics"),
    [
        ('sum by (instance, le) (rate(a_bucket{job="x y"}[5m])) > 5', {"a_bucket"}),
        ('a - b{c=~"d|e"} offset 15m and on (f) increase(g_total[1h:5m]) > 0 or vector(0)', {"a", "b", "g_total"}),
        ('absent(up{job="x"} == 1)', {"up"}),
        ("histogram_quantile(0.99, unknown)", {"unknown"}),
    ],
)
def test_metrics_are_found_in_expressions(expression, metrics):
    assert metrics_of(expression) == metrics


def test_series_have_the_names_that_prometheus_sees():
    names = exported()
    assert {"kubeproxy_sync_proxy_rules_duration_seconds_bucket", "kubenode_proxy_drift_repaired_total"} <= names
    assert "kubeproxy_sync_proxy_rules_no_local_endpoints_total" in names
    assert "kubeproxy_sync_proxy_rules_duration_seconds" not in names
    assert "process_resident_memory_bytes" in names


def test_alerts_name_only_metrics_that_the_agent_exports():
    known = exported() | exported_on_request() | OF_PROMETHEUS
    wrong = {rule["alert"]: metrics_of(rule["expr"]) - known for rule in rules()}
    assert {name: unknown for name, unknown in wrong.items() if unknown} == {}
    assert all(metrics_of(rule["expr"]) for rule in rules())


def test_the_dashboard_names_only_metrics_that_the_agent_exports():
    known = exported() | OF_PROMETHEUS
    assert {
        expression: unknown for expression in dashboard_expressions() if (unknown := metrics_of(expression) - known)
    } == {}


def test_all_own_metrics_are_shown():
    shown = {name for expression in dashboard_expressions() for name in metrics_of(expression)}
    own = {name for name in exported() if name.startswith("kubenode_proxy_")}
    assert own - shown == set()


def test_alerts_have_a_severity_and_a_description():
    found = rules()
    names = [rule["alert"] for rule in found]
    assert len(set(names)) == len(names) >= 10
    for rule in found:
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        assert re.match(r"[A-Z/'{]", rule["annotations"]["summary"]), rule["alert"]


def test_every_alert_is_documented():
    text = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in rules() if f"`{rule['alert']}`" not in text] == []


def test_the_dashboard_is_valid_for_grafana():
    found = expressions.dashboard()
    assert found["schemaVersion"] >= 36 and found["uid"] and found["title"]
    assert "id" not in found, "an identity of one Grafana is not for others"
    identities = [panel["id"] for panel in found["panels"]]
    assert len(set(identities)) == len(identities) and all(identity > 0 for identity in identities)
    variables = {variable["name"]: variable for variable in found["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["datasource"] == source and panel["title"] and panel["description"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) >= 1
        for target in panel["targets"]:
            assert target["datasource"] == source
            assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= {*variables, "__rate_interval"}


def test_panels_do_not_overlap():
    taken = {}
    for panel in expressions.dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["id"]) == panel["id"]
