# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two runs that change one node at the same moment: it ends with what one of them declares, nothing of the other.

tests/systemd/test_two_playbooks.py has whole playbooks.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import pytest

from tests.lab.cluster import SNAPSHOT
from tests.modules.file_faults import CONFIGURATION
from tests.modules.harness import Node, Task

ROUNDS = 20
FILE = "/etc/sysctl.d/50-web.conf"
KEYS = ("net.ipv4.ip_forward", "net.ipv4.conf.all.rp_filter", "net.ipv4.conf.lo.rp_filter")
#: Of the rules of both tasks, and their targets.
PORTS = ((range(1, 9), "ACCEPT"), (range(5, 15), "DROP"))


def at_once(node: Node, module: str, tasks: list[dict[str, Any]], look: str, seconds: float) -> None:
    """Run the tasks together in each round, the second one up to some seconds later, and check the end of each."""
    chance = random.Random(1)
    question = {"module": module, "tasks": tasks, "look": look}
    question["delays"] = [chance.uniform(0, seconds) for _number in range(ROUNDS)]
    done = node.run(sys.executable, "-m", "tests.modules.two_runs", text=json.dumps(question))
    answer = json.loads(done.stdout)
    assert answer["alone"][0] != answer["alone"][1]
    assert [each for each in answer["together"] if each not in answer["alone"]] == []
    for result in answer["results"]:
        assert isinstance(result, dict) and not result.get("failed"), result


def test_parameters_have_the_values_of_the_file_for_the_next_boot(node: Node) -> None:
    tasks = [{"values": dict.fromkeys(KEYS, value), "persistent_file": FILE} for value in (0, 1)]
    at_once(node, "sysctls", tasks, f"sysctl {' '.join(KEYS)}; cat {FILE}", 0.05)


def test_chains_are_those_of_one_task(node: Node) -> None:
    rules = [[f"-p tcp --dport {port} -j {target}" for port in ports] for ports, target in PORTS]
    tasks = [{"variant": "nft", "chains": [{"table": "filter", "name": "WEB", "rules": each}]} for each in rules]
    at_once(node, "iptables_chains", tasks, "iptables-nft-save -t filter | grep -e '-A WEB'", 0.05)


@pytest.mark.full
def test_services_are_those_of_one_convergence(node: Node) -> None:
    document = json.loads(SNAPSHOT.read_text())
    services = [raw for raw in document["items"] if raw["kind"] == "Service"]
    document["items"] = [raw for raw in document["items"] if raw["kind"] != "Service" or raw in services[::2]]
    fewer = node.scratch / "fewer.json"
    fewer.write_text(json.dumps(document))
    common = {"node_name": "lab-iptables", "mode": "nftables", "max_unserved_percent": 100}
    tasks = [{"snapshot": str(path), "configuration": CONFIGURATION, **common} for path in (SNAPSHOT, fewer)]
    look = "nft -s list table ip kube-proxy | tr -d ' \\t' | tr ',' '\\n' | sort; cat /run/kubenode-proxy/ledger.json"
    at_once(node, "service_proxy", tasks, look, 1.0)


RECORD = "/run/kubenode-run"


def shell(script: str) -> Task:
    return {"ansible.builtin.shell": {"cmd": script}, "changed_when": False}


def test_one_run_of_ansible_changes_a_node_at_a_time(node: Node) -> None:
    take, end = ({"kubenode.proxy.node_programs": {"names": [], "turn": turn}} for turn in ("take", "end"))
    look = shell(f"cat {RECORD} 2>/dev/null || echo nobody")
    found = node.play(
        *(shell(f"echo 1 elsewhere >{RECORD}"), take, end, look),
        *({**take, "check_mode": True}, look),
        # No process has this number.
        *(shell(f'echo 4194305 "$(uname -n)" >{RECORD}'), take, take, look, end, look),
        *(shell(f"echo 1 elsewhere >{RECORD}; touch -d '61 minutes ago' {RECORD}"), take, end, look),
    )
    # The shell of a user may say something before and after each command.
    shell_script = '#!/bin/sh\necho hello; /bin/sh "$@"; status=$?; echo bye; exit $status\n'
    node.run("sh", "-c", "cat >/run/shell; chmod 755 /run/shell", text=shell_script)
    noisy = {"vars": {"ansible_shell_executable": "/run/shell"}}
    assert not [each["msg"] for each in node.play({**take, **noisy}, {**end, **noisy}) if each.get("failed")]
    held = f"{RECORD}: another run of Ansible changes this node: process 1 on elsewhere; "
    assert found[1]["msg"] == held + "run this again when it has ended, or remove the file if it was killed"
    for number, holder in ((3, "1 elsewhere"), (5, "1 elsewhere"), (11, "nobody"), (15, "nobody")):
        assert found[number]["stdout"] == holder, (number, found[number])
    assert found[9]["stdout"].split()[0] != "4194305"
    assert all(not found[number].get("failed") for number in (2, 4, 7, 8, 10, 13, 14)), found
