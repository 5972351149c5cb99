# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shipped rulebooks in ansible-rulebook itself, from hostile Events of the API server to what a playbook does."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import threading
import time

import pytest
import yaml

from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.border.forms import ACTION, LITERALS, TEMPLATES
from tests.conftest import ROOT
from tests.lab.manifests import node
from tests.unit.eda.test_agent_events import event

BIN = ROOT / ".cache" / "rulebook" / "bin"
# For all tickets, one after the other.
SECONDS = 900.0


class Tickets:
    """A server that keeps the tickets that it gets."""

    def __init__(self):
        self.found = found = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                """Print nothing."""

            def do_POST(self):
                found.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(201)
                self.end_headers()

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def api():
    server = ApiServer(Store(), None)
    server.store.put(node("worker-1", "192.0.2.11", "10.1.1.0/24"))
    yield server
    server.close()


@contextlib.contextmanager
def running(api, directory, rulebook, variables):
    """Run a rulebook until the end of the block."""
    local = {"ansible_connection": "local", "ansible_python_interpreter": str(BIN / "python")}
    inventory = {
        "k8s_cluster": {"hosts": {"worker-1": local, "worker-2": local}},
        "local": {"hosts": {"localhost": local}},
    }
    (directory / "inventory.yml").write_text(yaml.safe_dump(inventory))
    (directory / "variables.yml").write_text(yaml.safe_dump(variables))
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
        "ANSIBLE_HOME": str(directory / "home"),
        "K8S_AUTH_HOST": api.url,
    }
    argv = [
        str(BIN / "ansible-rulebook"),
        "--rulebook",
        str(rulebook),
        "--inventory",
        "inventory.yml",
        "--vars",
        "variables.yml",
    ]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(argv, cwd=directory, env=environment, stdout=log, stderr=log)
        try:
            until(lambda: any("watch=true" in path for path in api.requests), process, directory)
            yield process
        finally:
            process.terminate()
            process.wait(30)


def until(condition, process, directory):
    """Wait for a condition while the program runs."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None and time.monotonic() < end, (directory / "log").read_text()[-4000:]
        time.sleep(0.2)


def test_tickets_have_hostile_texts_as_texts(api, tmp_path):
    tickets = Tickets()
    texts = {**TEMPLATES, **LITERALS}
    with running(
        api, tmp_path, "kubenode.proxy.open_ticket", {"ticket_url": f"http://127.0.0.1:{tickets.server.server_port}/"}
    ) as process:
        for number, text in enumerate(texts.values()):
            note = text.replace(ACTION, f'lookup("pipe", "touch {tmp_path}/trace-{number}")')
            for about in (
                {"kind": "Service", "namespace": f"tenant-{number}", "name": name} for name in (note, "again")
            ):
                api.store.put(event("ObjectRefused", about, note=note))
        until(lambda: len(tickets.found) >= len(texts), process, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("trace-*")) == []
    # One for each namespace.
    assert len({ticket["title"].split("/")[0] for ticket in tickets.found}) == len(texts) == len(tickets.found)
    assert all(ticket["text"].startswith("The reason: ") and "lookup" in ticket["text"] for ticket in tickets.found)
    assert all(ticket["title"].startswith("Agents skip Service tenant-") for ticket in tickets.found)


def test_an_event_repairs_one_node_that_exists_and_one_of_a_tenant_none(api, tmp_path):
    rulebook = yaml.safe_load((ROOT / "extensions/eda/rulebooks/repair_drift.yml").read_text(encoding="utf-8"))
    rulebook[0]["rules"][0]["action"]["run_playbook"]["name"] = "play.yml"
    (tmp_path / "rulebook.yml").write_text(yaml.safe_dump(rulebook))
    task = {"ansible.builtin.file": {"path": f"{tmp_path}/repaired-{{{{ inventory_hostname }}}}", "state": "touch"}}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [task]}]))
    for number, name in enumerate(("all", "worker-2"), 2):
        api.store.put(node(name, f"192.0.2.1{number}", f"10.1.{number}.0/24"))
    with running(api, tmp_path, "rulebook.yml", {}) as process:
        forged = event("DriftNotRepaired", {"kind": "Node", "name": "worker-2"})
        api.store.put({**forged, "metadata": {**forged["metadata"], "namespace": "tenant"}})
        for name in ("all", "localhost", "worker-3", "k8s_cluster", "worker-1"):
            api.store.put(event("DriftNotRepaired", {"kind": "Node", "name": name}))
        until(lambda: list(tmp_path.glob("repaired-*")), process, tmp_path)
        time.sleep(2.0)
    assert [path.name for path in tmp_path.glob("repaired-*")] == ["repaired-worker-1"]
