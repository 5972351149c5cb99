# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook report against a lab node, an unreachable host, and one without Python."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.lab.ansible_playbook import ansible_playbook
from tests.lab.cluster import SNAPSHOT, Lab
from tests.lab.demo.playbooks import VARIABLES
from tests.modules.harness import ROOT

NODE = "lab-iptables"
# Names that an API server would refuse, and that must be treated as plain text.
HOSTILE = ("{{ lookup('pipe', 'touch MARK') }}", "<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>")
LOST = {
    "k8s_cluster": {
        "hosts": {
            "gone": {"ansible_host": "127.0.0.1", "ansible_port": 9, "ansible_connection": "ssh"},
            "bare": {"ansible_connection": "local", "ansible_python_interpreter": "/nonexistent/python"},
        }
    }
}


class Reporter:
    """A lab with one node, and the playbook run from a separate directory."""

    def __init__(self, lab: Lab, place: Path) -> None:
        self.lab = lab
        self.place = place
        self.mark = place / "mark"
        cluster = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
        service = next(item for item in cluster["items"] if item["kind"] == "Service")
        for number, name in enumerate(HOSTILE):
            bad = copy.deepcopy(service)
            bad["metadata"].update(name=name.replace("MARK", str(self.mark)), uid=f"bad-{number}")
            cluster["items"].append(bad)
        self.snapshot = place / "cluster.json"
        self.snapshot.write_text(json.dumps(cluster), encoding="utf-8")
        (place / "lost.json").write_text(json.dumps(LOST), encoding="utf-8")

    def run(self, *options):
        """Run the playbook and return its status and output."""
        argv = [*ansible_playbook(), "-i", str(self.lab.inventory)]
        argv += ["-e", f"@{VARIABLES}", "kubenode.proxy.report", *options]
        environment = {
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_LOCAL_TEMP": str(self.place / "local"),
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
            # Where no shell has started Ansible, this may be of another directory.
            "PWD": "/nonexistent",
            "TMPDIR": str(self.place),
        }
        done = subprocess.run(argv, env=environment, cwd=self.place, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def document(self, name="fleet-report.json"):
        return json.loads((self.place / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def reporter():
    # The path of an ssh control socket must be short, so the lab has a separate directory.
    with tempfile.TemporaryDirectory(prefix="knr") as scratch, Lab("report", nodes=(NODE,)) as lab:
        yield Reporter(lab, Path(scratch))


def test_hosts_that_cannot_be_inspected_are_in_the_report(reporter):
    lost = ("-i", str(reporter.place / "lost.json"))
    traffic = ("-e", "verify_traffic=true", "-e", "verify_services=default/kubernetes,shop/web")
    status, output = reporter.run(*lost, *traffic, "-e", f"service_proxy_snapshot={reporter.snapshot}")
    assert status == 0, output
    assert set(re.findall(r"changed=(\d+) +unreachable=(\d+) +failed=(\d+)", output)) == {("0", "0", "0")}
    assert "3 nodes: 1 unreachable, 1 failed, 1 drifted" in output
    found = reporter.document()
    states = {node["name"]: node["state"] for node in found["nodes"]}
    assert states == {"bare": "failed", "gone": "unreachable", NODE: "drifted"}
    node = next(node for node in found["nodes"] if node["name"] == NODE)
    assert (node["mode"], node["kernel"], node["agent"]) == ("iptables", os.uname().release, None)
    assert node["services"] > 3 and node["drift_entries"] > 10 and node["distribution"]
    kinds = {item["kind"]: item for item in found["exceptions"]}
    assert "refused" in kinds["unreachable"]["items"][0]["words"]
    assert "/nonexistent/python" in kinds["failed"]["items"][0]["words"]
    # Nothing is programmed on the node.
    unreached = {(item["subject"], *item["nodes"]) for item in kinds["unreached"]["items"]}
    assert unreached == {("default/kubernetes", NODE), ("shop/web", NODE)}
    page = (reporter.place / "fleet-report.html").read_text(encoding="utf-8")
    assert "0 of 1 nodes reach all of these Services." in page
    assert re.fullmatch(r"\d+\.\d+\.\d+\+[0-9a-f]{12}", found["collection"]["engine"])
    assert list(reporter.place.glob("kubenode-proxy-*")) == []


def test_names_from_the_cluster_are_escaped(reporter):
    refused = next(item for item in reporter.document()["exceptions"] if item["kind"] == "refused")
    subjects = {item["subject"] for item in refused["items"]}
    assert subjects == {f"Service default/{name.replace('MARK', str(reporter.mark))}" for name in HOSTILE}
    assert not reporter.mark.exists()
    page = (reporter.place / "fleet-report.html").read_text(encoding="utf-8")
    assert not re.search(r"<img|<script>alert", page)


def test_a_second_report_shows_what_has_changed_since_the_first(reporter):
    assert reporter.document()["previous"] is None
    status, output = reporter.run("-e", f"service_proxy_snapshot={reporter.snapshot.name}")
    assert status == 0, output
    previous = reporter.document()["previous"]
    gone = [change["nodes"] for change in previous["changes"] if not change["now"]]
    assert sorted(gone) == [["bare"], ["gone"]] and previous["numbers"]["nodes"] == -2


def test_without_the_clusters_state_and_in_check_mode(reporter):
    # More connections than this machine tracks; only its first network namespace may change that.
    configuration = {"conntrack": {"maxPerCore": 1, "min": 1_000_000_000}}
    status, output = reporter.run(
        "--check",
        *("-e", "service_proxy_compare=false", "-e", "proxy_report_json=other.json", "-e", "proxy_report_title=Two"),
        *("-e", json.dumps({"service_proxy_configuration": configuration})),
    )
    assert status == 0, output
    found = reporter.document("other.json")
    assert (found["title"], [node["state"] for node in found["nodes"]]) == ("Two", ["ok"])
    assert (found["nodes"][0]["drift"], found["nodes"][0]["services"]) == (None, None)
    assert [item["kind"] for item in found["exceptions"]] == ["warned"]


def test_a_live_report_reads_the_agents_only(reporter):
    status, output = reporter.run(
        *("-i", str(reporter.place / "lost.json"), "-e", "proxy_report_live=true", "-e", "proxy_report_json=live.json")
    )
    assert status == 0 and "Read the cluster's state" not in output, output
    found = {node["name"]: node for node in reporter.document("live.json")["nodes"]}
    # No agent runs on the lab's node.
    assert {name: node["state"] for name, node in found.items()} == {
        "bare": "failed",
        "gone": "unreachable",
        NODE: "agent",
    }
    assert "no agent answers" in found[NODE]["agent"]["trouble"] and found[NODE]["drift"] is None
