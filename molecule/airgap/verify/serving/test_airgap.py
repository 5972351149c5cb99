# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent serves on a node without its own libraries that can reach only the controller."""

from __future__ import annotations

from tests.molecule_support.checks import within


def test_node_has_no_route_to_other_networks(node):
    assert node.host.run("curl -s --max-time 2 http://192.0.2.80/").rc != 0
    assert node.host.run("getent hosts deb.debian.org").rc != 0


def test_node_has_no_libraries_of_its_own(node):
    for package in ("python3-yaml", "python3-kubernetes", "python3-prometheus-client"):
        assert not node.host.package(package).is_installed
    assert node.host.run("/usr/bin/python3 -c 'import yaml'").rc == 1
    assert node.host.file("/usr/local/lib/kubenode-proxy/libraries").exists


def test_agent_runs_and_serves(node):
    assert node.host.service("kubenode-proxy").is_running
    assert node.host.service("kubenode-proxy").is_enabled
    within(60, "the Service answers", lambda: node.ask("10.96.0.10", 80, timeout=1).backend == "pod-1-2")
    assert node.ask("198.51.100.20", 80).outcome == "answer"
    assert {answer.outcome for answer in node.ask_inside("10.96.0.20", 80, node.pods[0], 6)} == {"answer"}


def test_nothing_was_sent_to_any_other_host_before_these_checks(scenario):
    # The checks above run in this order and send packets themselves; the file holds the count from before them.
    counted = (scenario.directory / "unexpected").read_text(encoding="ascii").split()
    assert len(counted) == 3
    assert set(counted) == {"0"}
