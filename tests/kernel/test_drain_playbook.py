# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook drain.yml: each host is drained, the tasks run, and the drain ends; after a failure it does not."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

from tests.kernel.agent_node import NODE
from tests.kernel.drain_lab import NODES, DrainLab, drain_lab
from tests.lab.ansible_playbook import ansible_playbook
from tests.lab.namespaces import ansible_environment

ROOT = Path(__file__).resolve().parents[2]
# The tasks leave a file with the state of the drain; with a file ``fail`` beside it they fail.
TASKS = """\
- name: Record the drain
  ansible.builtin.shell: "{{ test_command }} drain status --json >{{ test_scratch }}/{{ inventory_hostname }}.json"
- name: Fail on request
  ansible.builtin.command: test ! -e {{ test_scratch }}/fail
"""
SNAPSHOT = ("/api/v1/services", "/api/v1/nodes", "/apis/discovery.k8s.io/v1/endpointslices")
# The command with the paths of the test: an agent's socket, and the file of the drain.
COMMAND = """\
#!/bin/sh
export PYTHONPATH={root}/plugins
[ "$1" != drain ] || set -- "$@" --drain-file {scratch}/drain.json
exec nsenter --net={namespace} {python} -m module_utils.command.cli "$@" --control {scratch}/agent.sock
"""


class Drainer:
    """The hosts, and the playbook run from a directory with the tasks."""

    def __init__(self, lab: DrainLab, scratch: Path) -> None:
        self.lab = lab
        self.scratch = scratch
        hosts = {}
        for number in NODES:
            node = lab.add_node(number, "nftables")
            node.start()
            command = scratch / f"command-{number}"
            own = node.agent.scratch
            command.write_text(
                COMMAND.format(root=ROOT, scratch=own, namespace=node.namespace, python=shlex.quote(sys.executable))
            )
            command.chmod(0o755)
            interpreter = scratch / f"python-{number}"
            interpreter.write_text(f'#!/bin/sh\nexec nsenter --net={node.namespace} {sys.executable} "$@"\n')
            interpreter.chmod(0o755)
            snapshot = scratch / f"cluster-{number}.json"
            items = [item for path in SNAPSHOT for item in node.agent.store.list(path)[0]]
            snapshot.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
            hosts[f"node{number}"] = {
                "test_command": str(command),
                "ansible_python_interpreter": str(interpreter),
                "service_proxy_configuration": node.agent.configuration,
                "service_proxy_snapshot": str(snapshot),
                "service_proxy_node_name": NODE,
            }
        variables = {
            "ansible_connection": "local",
            "ansible_become": False,
            "test_scratch": str(scratch),
            "drain_deadline": "60s",
            "drain_quiet": "4s",
        }
        (scratch / "inventory.json").write_text(json.dumps({"k8s_cluster": {"hosts": hosts, "vars": variables}}))
        (scratch / "tasks.yml").write_text(TASKS)

    def run(self, *options: str) -> tuple[int, str]:
        """Run the playbook; return its status and output."""
        environment = {**os.environ, **ansible_environment(self.scratch), "PWD": "/nonexistent"}
        argv = [*ansible_playbook(), "-i", str(self.scratch / "inventory.json"), "kubenode.proxy.drain"]
        argv += ["-e", '{"__drain_command": "{{ test_command }}", "__drain_part": 1}', *options]
        done = subprocess.run(argv, env=environment, cwd=self.scratch, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def recorded(self, number: int) -> bool:
        """Return whether the tasks ran on a host; fail if it was not drained meanwhile."""
        path = self.scratch / f"node{number}.json"
        if not path.exists():
            return False
        assert json.loads(path.read_text())["drained"] is True
        path.unlink()
        return True

    def healthy(self, number: int) -> bool:
        return self.lab.nodes[number].health()[0] == 200


@pytest.fixture
def drainer(tmp_path) -> Iterator[Drainer]:
    with drain_lab(tmp_path) as lab:
        yield Drainer(lab, tmp_path)


def test_hosts_are_drained_one_after_the_other_and_stay_drained_after_a_failure(drainer):
    code, output = drainer.run()
    assert code == 2 and "drain_tasks: name a file with the tasks" in output, output
    code, output = drainer.run("--check", "-e", "drain_tasks=tasks.yml")
    assert code == 0 and not drainer.recorded(1), output
    assert drainer.healthy(1) and drainer.healthy(2)

    (drainer.scratch / "fail").touch()
    code, output = drainer.run("-e", "drain_tasks=tasks.yml")
    assert code == 2 and "run there: kubenode-proxy drain stop" in " ".join(output.split()), output
    assert drainer.recorded(1) and not drainer.healthy(1)
    assert not drainer.recorded(2) and drainer.healthy(2)

    (drainer.scratch / "fail").unlink()
    code, output = drainer.run("-e", "drain_tasks=tasks.yml")
    assert code == 0, output
    assert "node1: 0 external connections are left after" in output
    assert "node1: in use: no external connection" in output, "the wait is not silent"
    assert "node2: back in service, served by the agent, verified" in output
    assert output.count("in accordance with the cluster's state") == 2, output
    assert drainer.recorded(1) and drainer.recorded(2)
    assert drainer.healthy(1) and drainer.healthy(2)

    drainer.lab.nodes[1].agent.stop()
    code, output = drainer.run("-e", "drain_tasks=tasks.yml")
    assert code == 2 and "The host was not drained" in output and not drainer.recorded(1), output
    assert "only a running agent answers health checks" in output
