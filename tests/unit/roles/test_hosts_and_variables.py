# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""No playbook succeeds without hosts, or with a variable whose name is misspelt."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.variable_names import (
    collection_variables,
    invalid_values,
    options_of,
    unknown_extra,
    unknown_in_inventory,
    without_effect,
)
from tests.conftest import ROOT
from tests.documentation import collection
from tests.documentation.playbook_variables import VARIABLES
from tests.unit.roles.rendering import rendered

KNOWN = collection_variables(ROOT)
INVENTORY = {
    "k8s_cluster": {
        "hosts": {
            "n1": {"ansible_connection": "local", "drain_cutt": False, "proxy_host": "http.example", "proxy_serial": 1}
        }
    },
    "others": {"hosts": {"m1": {"ansible_connection": "local"}}},
}


ROLLBACK = "kubenode.proxy.service_proxy_rollback"
REMOVALS = ("agent_state", "service_proxy_state", "kernel_state")


def plays(name: str) -> list[dict[str, Any]]:
    """Return the plays of a playbook."""
    found: list[dict[str, Any]] = yaml.safe_load((ROOT / "playbooks" / f"{name}.yml").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", collection.playbook_names())
def test_all_plays_get_their_hosts_from_the_lookup(name: str) -> None:
    assert {play["hosts"] for play in plays(name)} == {"{{ query('kubenode.proxy.hosts') }}"}


def test_playbooks_with_variables_of_their_own_check_those_of_the_inventory_first() -> None:
    own = {name for item in VARIABLES for name in item.playbooks if not item.name.startswith(("proxy_", "verify_"))}
    for name in own | {"verify"}:
        first = next(task for task in plays(name)[0]["tasks"] if task.get("ansible.builtin.meta") != "end_host")
        assert "kubenode.proxy.role_variables" in first and first["tags"] == "always", name


def run(directory: Path, playbook: str, *arguments: str, **environment_of: str) -> subprocess.CompletedProcess[str]:
    """Run a playbook that would change nothing on its hosts."""
    (directory / "hosts.yml").write_text(yaml.safe_dump(INVENTORY))
    argv = [str(Path(sys.executable).with_name("ansible-playbook")), *arguments, playbook]
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
        "ANSIBLE_HOME": str(ROOT / ".cache" / "ansible"),
        "ANSIBLE_NOCOLOR": "1",
        "COLUMNS": "1000",
        **environment_of,
    }
    return subprocess.run(argv, cwd=directory, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("-i", "no-such-file"), "the inventory has no hosts: check its source"),
        (("-i", "hosts.yml", "-e", "proxy_hosts=nods"), "proxy_hosts: no host of the inventory matches nods"),
        (("-i", "hosts.yml", "--limit", "m1"), "--limit m1: none of these hosts is one of k8s_cluster"),
        (
            ("-i", "hosts.yml", "-e", "proxy_serial=abc"),
            "proxy_serial: 'abc' is neither a number of hosts, from 1, nor a",
        ),
        (("-i", "hosts.yml", "-e", "proxy_max_fail_percentage=150"), "150 is not between 0 and 100"),
        (("-i", "hosts.yml", "-e", "service_proxy_max_unserved_percent=150"), "150 is not between 0 and 100"),
        (("-i", "hosts.yml", "--skip-tags", "always"), "--skip-tags always: this skips the checks of the first tasks"),
        (
            ("-i", "hosts.yml", "--skip-tags", "a,tagged"),
            "--skip-tags tagged: this skips the checks of the first tasks",
        ),
        (("-i", "hosts.yml", "--start-at-task", "Say"), "--start-at-task: the first tasks check the hosts"),
        (("-i", "m1,"), "the inventory has no group k8s_cluster; name the hosts"),
        (("-i", "hosts.yml", "-e", "migrate_directon=back"), "did you mean migrate_direction?"),
        (
            ("-i", "hosts.yml", "-e", "service_proxy_mode=iptable"),
            "'iptable' is not one of auto, iptables, ipvs, nftables, userspace; did you mean iptables?",
        ),
        (
            ("-i", "hosts.yml", "-e", "migrate_manage_kube_proxy=ture"),
            "migrate_manage_kube_proxy: 'ture' is not true or false",
        ),
        (
            ("-i", "hosts.yml", "-e", "service_proxy_confirm_timeout=2m"),
            "service_proxy_confirm_timeout: '2m' is not a number",
        ),
        (
            ("-i", "hosts.yml"),
            "proxy_serial has no effect in an inventory: pass it with -e; drain_cutt is not a variable of this "
            "collection; did you mean drain_cut?",
        ),
    ],
)
def test_a_verification_of_nothing_or_with_a_misspelt_variable_fails(
    tmp_path: Path, arguments: list[str], reason: str
) -> None:
    done = run(tmp_path, "kubenode.proxy.verify", *arguments)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and reason in said, said
    assert len(said) < 2000


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *((f"{name}=absent", f"{name}: absent: this playbook installs") for name in REMOVALS),
        ("agent_remove_access=true", "agent_remove_access: the first agent that this playbook removes would take the"),
        ("agent_remove_access=true migrate_direction=back", "agent_remove_access: the first agent that this playbook"),
    ],
)
def test_hosts_are_not_taken_over_with_a_removal_left_in_the_inventory(tmp_path: Path, given: str, said: str) -> None:
    done = run(tmp_path, "kubenode.proxy.migrate", "-i", "hosts.yml", "-e", "proxy_hosts=m1", "-e", given)
    assert done.returncode != 0 and said in " ".join(done.stdout.split()), done.stdout + done.stderr


def test_no_host_is_changed_in_a_batch_that_cannot_be_confirmed_in_time() -> None:
    first = plays("migrate")[1]["tasks"][0]["ansible.builtin.include_role"]
    assert first == {"name": "kubenode.proxy.service_proxy", "tasks_from": "confirm_batch"}


def test_a_host_is_not_converged_to_the_snapshot_of_an_earlier_run() -> None:
    """Where migrate continues without a lost host, a copy that was not made has no destination."""
    text = (ROOT / "roles" / "service_proxy" / "tasks" / "present.yml").read_text(encoding="utf-8")
    assert text.count("register: __service_proxy_kept_snapshot") == 1
    assert "else __service_proxy_kept_snapshot).dest }}" in text and "~ '/snapshot.json.gz'" not in text


def test_kubelet_leaves_an_address_before_a_rollback() -> None:
    (block,) = (task["block"] for task in plays("rollback")[0]["tasks"] if "block" in task)
    used = [task.get("ansible.builtin.include_role", {}).get("tasks_from") for task in block]
    assert used == ["take_turn", None, "restore_kubelet", None]
    checked, done = (block[at] for at in (1, 3))
    assert checked["check_mode"] and checked[ROLLBACK] == done[ROLLBACK]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, "explain_from, explain_to: name the client and the destination"),
        (
            {"explain_from": "10.1.1.1", "explain_to": "10.96.0.1:53", "explain_command": "/no/command"},
            "run kubenode.proxy.agent",
        ),
    ],
)
def test_an_explanation_needs_a_flow_and_the_node_command(
    tmp_path: Path, variables: dict[str, str], reason: str
) -> None:
    given = {**variables, "drain_cut": True, "ansible_python_interpreter": sys.executable}
    given.update(service_proxy_mode="nftables", service_proxy_configuration={"mode": "ipvs"})
    hosts = {"k8s_cluster": {"hosts": {"n1": {"ansible_connection": "local", "ansible_become": False}}}}
    (tmp_path / "one.yml").write_text(yaml.safe_dump(hosts))
    done = run(tmp_path, "kubenode.proxy.explain", "-i", "one.yml", "-e", json.dumps(given))
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and reason in said, said
    assert "service_proxy_configuration.mode: ipvs has no effect, since service_proxy_mode is nftables" in said, said


def test_a_strategy_that_repeats_what_runs_once_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "kubenode.proxy.verify", "-i", "hosts.yml", ANSIBLE_STRATEGY="ansible.builtin.host_pinned")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "strategy ansible.builtin.host_pinned: it repeats" in said, said


#: In the place of ansible.posix.json, which prints one document at the end.
DOCUMENT = """
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = "name: json\\ntype: stdout\\nshort_description: a document\\n"


class CallbackModule(CallbackBase):
    CALLBACK_VERSION, CALLBACK_TYPE, CALLBACK_NAME = 2.0, "stdout", "json"

    def v2_playbook_on_stats(self, stats):
        self._display.display('{"ok": %d}' % sum(stats.ok.values()))
"""


def test_standard_output_is_one_document_where_it_is_for_programs(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(DOCUMENT)
    task = {"kubenode.proxy.host_summary": {"sentence": "is served \x1b[1m"}}
    (tmp_path / "site.yml").write_text(yaml.safe_dump([{"hosts": "others", "gather_facts": False, "tasks": [task]}]))
    plugins = {"ANSIBLE_CALLBACK_PLUGINS": str(tmp_path), "ANSIBLE_STDOUT_CALLBACK": "json"}
    done = run(tmp_path, "site.yml", "-i", "hosts.yml", **plugins)
    assert json.loads(done.stdout) == {"ok": 1} and "m1: is served ?[1m" in done.stderr, done.stdout + done.stderr


def test_a_setting_that_another_variable_overrides_is_named_unless_both_agree() -> None:
    layers = {"agent_configuration": {"mode": "ipvs"}, "service_proxy_mode": "nftables"}
    agreed = {"service_proxy_configuration": {"mode": "ipvs"}}
    expression = {"service_proxy_node_configuration": {"behaviour": "{{ x }}"}, "service_proxy_behaviour": "corrected"}
    assert without_effect({**layers, **agreed, **expression}) == [
        "service_proxy_mode: nftables has no effect, since agent_configuration.mode is ipvs"
    ]


def test_a_playbook_of_the_user_may_import_one_for_hosts_outside_the_limit(tmp_path: Path) -> None:
    site = [
        {"import_playbook": "kubenode.proxy.report", "vars": {"proxy_hosts": "{{ nodes | default('k8s_cluster') }}"}},
        {"hosts": "others", "gather_facts": False, "tasks": [{"ansible.builtin.debug": {"msg": "the other hosts"}}]},
    ]
    (tmp_path / "site.yml").write_text(yaml.safe_dump(site))
    done = run(tmp_path, "site.yml", "-i", "hosts.yml", "--limit", "m1")
    assert done.returncode == 0 and "the other hosts" in done.stdout, done.stdout + done.stderr


def test_playbooks_need_no_inventory_for_their_syntax_and_tasks(tmp_path: Path) -> None:
    for option in ("--syntax-check", "--list-tasks"):
        done = run(tmp_path, "kubenode.proxy.verify", "-i", "no-such-file", option)
        assert done.returncode == 0, done.stderr


def test_misspelt_variables_of_playbooks_are_known_from_the_right_ones() -> None:
    assert unknown_extra(frozenset({item.name for item in VARIABLES}), KNOWN) == []
    for item in VARIABLES:
        for wrong in (item.name[:-1], item.name + "s", item.name.replace("_", "", 1)):
            prefix = next((found for found in ("drain_", "migrate_", "explain_") if wrong.startswith(found)), None)
            if wrong not in KNOWN and prefix and len(item.name) > len(prefix) + 3:
                (found,) = unknown_extra(frozenset({wrong}), KNOWN)
                assert found.nearest in KNOWN and found.nearest
                assert unknown_in_inventory(frozenset({wrong}), KNOWN) == [found]


def test_variables_of_other_software_are_no_misspelt_ones_in_an_inventory() -> None:
    others = {"proxy_host", "proxy_env", "verify_ssl", "kernel_version", "agent_port", "report_html", "drainage"}
    assert unknown_in_inventory(frozenset(others), KNOWN) == []
    assert {found.nearest for found in unknown_extra(frozenset({"report_html", "proxy_host"}), KNOWN)} == {
        "proxy_report_html",
        "proxy_hosts",
    }


def test_values_of_a_wrong_type_are_named_wherever_they_are() -> None:
    options = options_of(ROOT)
    wrong = {
        "agent_hold_loss": "nan",
        "agent_kubelet_delay": 11,
        "agent_memory_max": "1Gi",
        "agent_python": "python3",
        "agent_token_seconds": 599,
        "agent_watchdog_seconds": 0,
        "kernel_conntrack": {"min": -1},
        "migrate_agent": "flase",
        "migrate_direction": "bak",
        "migrate_probes": [{"host": "10.96.0.1", "port": 65536}],
        "migrate_wait_timeout": "5m",
        "proxy_max_fail_percentage": "none",
        "proxy_report_stale_after": -1,
        "proxy_serial": [1, "0%"],
        "schedule_check": "maybe",
        "schedule_interval": "hourly",
        # A form that read it in many ways would not end.
        "schedule_jitter": f"{'1' * 60} sekunden",
        "schedule_timeout": "0",
        "service_proxy_api_port": 65536,
        "service_proxy_configuration": "iptables",
        "service_proxy_directory": "",
        "service_proxy_ignore_findings": "ufw,cilium",
        "service_proxy_node_configuration": '{"behaviour": "corrected"}',
        "service_proxy_probes": None,
    }
    lines = invalid_values(wrong, options, ArgumentSpecValidator)
    assert len(lines) == len(wrong) and all(line.startswith(f"{name}: ") for name, line in zip(wrong, lines))
    assert (
        "migrate_probes: missing required arguments"
        in invalid_values({"migrate_probes": [{}]}, options, ArgumentSpecValidator)[0]
    )
    right = {
        "proxy_serial": [1, "25%", 10],
        "service_proxy_max_unserved_percent": 100,
        "migrate_agent": "no",
        "migrate_probes": [{"host": "10.96.0.1", "port": "443", "timeout": 3}],
        "migrate_wait_timeout": "{{ seconds }}",
        "service_proxy_directory": None,
        "service_proxy_history_directory": "/srv/states",
        "service_proxy_ignore_findings": ["ufw", "cilium"],
        "agent_memory_max": "512M",
        "schedule_interval": "1h 30min",
        "schedule_jitter": "0",
        "schedule_timeout": 600,
        "service_proxy_keep_states": "7",
        "service_proxy_kubelet_kubeconfig": "",
        "service_proxy_mode": "",
    }
    assert invalid_values(right, options, ArgumentSpecValidator) == []


@pytest.mark.parametrize(
    ("role", "variables", "said"),
    [
        ("agent", {}, "the agent would be removed, and what it has programmed stays until a reboot"),
        (
            "agent",
            {"agent_remove_dataplane": True},
            "the agent would be removed, and what it has programmed too; NOTHING",
        ),
        ("service_proxy", {}, "NOTHING until kube-proxy does, which is not kept off"),
        ("service_proxy", {"__service_proxy_placement": {"changes": []}}, "NOTHING, and kube-proxy is kept off"),
    ],
)
def test_a_preview_of_a_removal_does_not_claim_it(
    tmp_path: Path, role: str, variables: dict[str, Any], said: str
) -> None:
    nothing = "nothing would serve it"
    unserved = yaml.safe_load((ROOT / "roles" / "service_proxy" / "tasks" / "unserved.yml").read_text(encoding="utf-8"))
    recorded = unserved[-1]["ansible.builtin.set_fact"]["__service_proxy_afterwards"]
    tasks = plays("agent")[0]["tasks"][-1]["block"]
    last = next(task for task in tasks if task["name"] == "Say what serves the host")
    shown = last["kubenode.proxy.host_summary"]["sentence"] if role == "agent" else recorded
    case = {"__service_proxy_placement": {"changes": ["the label"]}, "__service_proxy_afterwards": nothing, **variables}
    case = {"sentence": shown, f"{role}_state": "absent", **case}
    assert rendered(tmp_path, (role,), "sentence", [case], "--check") == [said.replace("NOTHING", nothing)]


MARK = "Node a, DaemonSet kube-system/kube-proxy, label kubenode.proxy/managed"
NO_NODE = {"msg": "nodes: no Node is named a", "error_kind": "preflight"}
OUTSIDE = {"service_proxy_node_configuration": {"outsideHost": {"enabled": True}}}
#: What the API server said, the mark on the host, other variables, and whether the host may be left unserved.
PLACEMENTS: list[tuple[dict[str, Any], str, dict[str, Any], bool]] = [
    ({"changes": []}, "", {}, False),
    ({"changes": ["Node a: labelled"]}, "", {}, True),
    ({"changes": ["Node a: labelled"]}, MARK, {}, True),
    ({"changes": ["Node a: labelled"]}, MARK, {"migrate_label": "other"}, False),
    ({"msg": "get Node a: HTTP 500", "error_kind": "api"}, "", {}, False),
    ({"msg": "no credentials", "error_kind": "configuration"}, "", {}, True),
    ({"msg": "no credentials", "error_kind": "configuration"}, MARK, {}, False),
    (NO_NODE, "", {}, False),
    (NO_NODE, "", OUTSIDE, True),
]


def test_a_host_is_not_left_unserved_because_nobody_knows(tmp_path: Path) -> None:
    tasks = yaml.safe_load((ROOT / "roles" / "service_proxy" / "tasks" / "unserved.yml").read_text(encoding="utf-8"))
    (task,) = (item for item in tasks if item["name"] == "Refuse to leave a host that nothing serves")
    cases = [
        {
            "__service_proxy_placement": result,
            "__service_proxy_recorded": {"content": base64.b64encode(mark.encode()).decode()},
            "service_proxy_leave_unserved": confirmed,
            "service_proxy_node_name": "a",
            **more,
        }
        for result, mark, more, _unserved in PLACEMENTS
        for confirmed in (False, True)
    ]
    found = rendered(tmp_path, ("service_proxy",), task["ansible.builtin.assert"]["that"], cases)
    assert found == [allowed for *_case, unserved in PLACEMENTS for allowed in (unserved, True)]


def test_probes_are_requested_by_either_variable(tmp_path: Path) -> None:
    cases = [
        {},
        {"service_proxy_traffic": True, "service_proxy_traffic_services": ["a/b"]},
        {"verify_traffic": False, "service_proxy_traffic": True},
        {"verify_traffic": "true", "verify_services": "c/d"},
    ]
    expression = "[__service_proxy_traffic | bool, __service_proxy_traffic_services]"
    found = rendered(tmp_path, ("service_proxy",), expression, cases)
    assert found == [[False, []], [True, ["a/b"]], [False, []], [True, "c/d"]]


def test_each_part_of_the_wait_for_a_drain_is_longer_since_python_limits_how_deep_a_file_includes_itself(
    tmp_path: Path,
) -> None:
    tasks = yaml.safe_load((ROOT / "playbooks" / "node" / "drained.yml").read_text(encoding="utf-8"))
    seconds = tasks[0]["ansible.builtin.wait_for"]["timeout"]
    parts = [0, 10, 20, 100, 600, 3600]
    cases = [{"seconds": seconds, "__drain_part": 10, "__drain_waited": {"elapsed": part}} for part in parts]
    assert rendered(tmp_path, ("agent",), "seconds | int", cases) == [10, 11, 21, 105, 630, 3780]
