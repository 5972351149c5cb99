# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check the rules and the dashboard's expressions with Prometheus' own promtool."""

from __future__ import annotations

import subprocess
from collections import defaultdict

import pytest
import yaml

from tests.conftest import ROOT
from tests.monitoring.expressions import ALERTS, dashboard_expressions, rules

TESTS = ROOT / "tests" / "monitoring" / "alerts-test.yml"


@pytest.fixture(scope="session")
def promtool():
    """Provide a function that runs promtool and returns its status and output."""
    found = subprocess.run([str(ROOT / ".ci" / "promtool")], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.exit(f"promtool is missing: {found.stderr.strip()}", returncode=2)
    path = found.stdout.strip()

    def run(*arguments):
        done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_the_rules_are_valid(promtool):
    status, output = promtool("check", "rules", "--lint-fatal", ALERTS)
    assert status == 0, output
    assert f"{len(rules())} rules found" in output


def test_alerts_fire_when_they_should_and_not_otherwise(promtool):
    status, output = promtool("test", "rules", TESTS)
    assert status == 0, output


def test_every_alert_is_tested_firing_and_quiet():
    cases = defaultdict(list)
    for test in yaml.safe_load(TESTS.read_text(encoding="utf-8"))["tests"]:
        for case in test["alert_rule_test"]:
            cases[case["alertname"]].append(bool(case["exp_alerts"]))
    assert {name: set(outcomes) for name, outcomes in cases.items()} == {
        rule["alert"]: {True, False} for rule in rules()
    }


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("== 0\n        for: 10m", "== 0\n        for: 40m"), (">= 3\n", ">= 11\n"), ("offset 15m", "offset 90m")],
)
def test_a_changed_rule_is_noticed(promtool, tmp_path, right, wrong):
    text = ALERTS.read_text(encoding="utf-8")
    assert right in text
    (tmp_path / "alerts.yml").write_text(text.replace(right, wrong), encoding="utf-8")
    tests = TESTS.read_text(encoding="utf-8").replace("../../examples/monitoring/alerts.yml", "alerts.yml")
    (tmp_path / "test.yml").write_text(tests, encoding="utf-8")
    status, output = promtool("test", "rules", tmp_path / "test.yml")
    assert status != 0 and "FAILED" in output


def test_expressions_of_the_dashboard_are_valid(promtool, tmp_path):
    listed = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(dashboard_expressions())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": listed}]}), encoding="utf-8")
    status, output = promtool("check", "rules", path)
    assert status == 0, output
    listed[0]["expr"] = "sum by (le (rate(x[5m]))"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": listed}]}), encoding="utf-8")
    assert promtool("check", "rules", path)[0] != 0


def test_the_example_scrape_configuration_is_valid(promtool, tmp_path):
    """Debian builds Prometheus without Kubernetes service discovery; everything else is checked."""
    text = (ROOT / "examples" / "monitoring" / "scrape.yml").read_text(encoding="utf-8")
    discovery = "kubernetes_sd_configs:\n      - role: node\n"
    assert discovery in text
    path = tmp_path / "scrape.yml"
    path.write_text(text.replace(discovery, "static_configs:\n      - targets: [a]\n"), encoding="utf-8")
    status, output = promtool("check", "config", "--syntax-only", path)
    assert status == 0, output
