# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook explain: hosts that answer alike, one that knows fewer endpoints, and some that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.lab import manifests
from tests.lab.ansible_playbook import ansible_playbook
from tests.modules.harness import ROOT

IP = "10.96.0.7"
COMMAND = """\
#!/bin/sh
PYTHONPATH={root}/plugins exec unshare -n {python} -m module_utils.command.cli "$@" \\
    --no-kernel --snapshot {snapshot} --node-name node1 --mode nftables
"""


def command(place: Path, name: str, endpoints: list[str]) -> str:
    """Write a node command for a host that knows these endpoints, and return its path."""
    ports = [manifests.port(80, name="http")]
    objects = [
        manifests.node("node1", "192.0.2.1", "10.244.1.0/24"),
        manifests.service("web", IP, ports, namespace="shop"),
        manifests.endpoint_slice("web", [manifests.endpoint(item) for item in endpoints], ports, namespace="shop"),
    ]
    snapshot, program = place / f"{name}.json", place / name
    snapshot.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    program.write_text(COMMAND.format(root=ROOT, python=sys.executable, snapshot=snapshot))
    program.chmod(0o755)
    return str(program)


def answering(place: Path, answer: str) -> str:
    """Write a node command that answers this, and return its path."""
    program = place / f"answering-{len(answer)}"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    return str(program)


def test_hosts_that_answer_differently_are_shown_first(tmp_path: Path) -> None:
    both = command(tmp_path, "both", ["10.244.1.5", "10.244.2.5"])
    hosts: dict[str, dict[str, str]] = {
        "first": {"explain_command": both},
        "second": {"explain_command": both},
        "behind": {"explain_command": command(tmp_path, "behind", ["10.244.1.5"])},
        "bare": {"explain_command": "/nonexistent/kubenode-proxy"},
        "hostile": {"explain_command": answering(tmp_path, '{"flows": [{"endpoints": [7]}], "allowed": true}')},
        "older": {"explain_command": answering(tmp_path, "{}")},
    }
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    inventory = tmp_path / "hosts.json"
    inventory.write_text(json.dumps({"k8s_cluster": {"vars": local, "hosts": hosts}}))
    words = ["-i", str(inventory), "-e", "explain_from=198.51.100.7", "-e", f"explain_to={IP}:80"]
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
        "ANSIBLE_LOCAL_TEMP": str(tmp_path / "local"),
        "ANSIBLE_NOCOLOR": "1",
        "LC_ALL": "C.UTF-8",
    }
    done = subprocess.run(
        [*ansible_playbook(), *words, "kubenode.proxy.explain"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    shown = [line.strip(' ",') for line in done.stdout.splitlines() if " of 6): " in line]
    assert shown[0].startswith("bare (1 of 6): no answer: "), done.stdout + done.stderr
    assert shown[1:] == [
        "behind (1 of 6): forwarded by Service shop/web to 10.244.1.5:80",
        "first, second (2 of 6): forwarded by Service shop/web to 10.244.1.5:80 or 10.244.2.5:80",
        "hostile, older (2 of 6): no answer: it answered in another form",
    ]
    assert done.returncode == 2 and "changed=0" in done.stdout and "changed=1" not in done.stdout
