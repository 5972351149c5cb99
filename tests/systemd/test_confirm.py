# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes that must be confirmed, on a node with a real systemd: reverted by the node itself, or kept."""

from __future__ import annotations

import json
import socket

import pytest

from tests.waiting import wait_for

from .cluster import endpoint_slice, service
from .cluster import node as node_object
from .node import Node, play, run_playbook

TIMER = "kubenode-proxy-revert.timer"
SERVICE = "kubenode-proxy-revert.service"
HISTORY = "/var/lib/kubenode-proxy-history"
PENDING = "/run/kubenode-proxy-confirm"
# Nothing was programmed in the states to which these tests return.
_ROLLBACK = {"rollback_accept_loss": True}
MANAGEMENT_PORT = 2222
# Long enough even for a loaded machine; for tests that do not wait until it expires.
LONG = 900
KUBECONFIG = """\
current-context: a
contexts: [{name: a, context: {cluster: a}}]
clusters: [{name: a, cluster: {server: "http://192.0.2.1:6443"}}]
"""
SERVER = """\
import http.server
http.server.ThreadingHTTPServer(("0.0.0.0", {port}), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


@pytest.fixture(scope="module")
def node(start):
    container = start("confirm")
    container.write("/srv/server.py", SERVER.format(port=MANAGEMENT_PORT))
    container.run("systemd-run", "--unit=management", "python3", "/srv/server.py")
    container.run("iptables", "-A", "INPUT", "-p", "tcp", "--dport", "9", "-j", "DROP")
    wait_for(lambda: reachable(container), what="the management port")
    return container


@pytest.fixture(autouse=True)
def _no_pending_change(node):
    """Start each test without a pending change and without anything programmed."""
    yield
    node.run("systemctl", "stop", TIMER, check=False)
    node.run("rm", "-rf", PENDING)
    play([node], [{"kubenode.proxy.service_proxy": {"state": "absent"}}], {})


def address_of(node: Node) -> str:
    return node.output("hostname", "-I").split()[0]


def reachable(node: Node) -> bool:
    """Return whether this machine, the controller, reaches the node's management port over the network."""
    try:
        with socket.create_connection((address_of(node), MANAGEMENT_PORT), 2):
            return True
    except OSError:
        return False


def snapshot(node: Node, *items) -> str:
    path = node.scratch / "snapshot.json"
    objects = [node_object(node.name, address_of(node)), *items]
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    return str(path)


def web() -> list:
    return [service("web", "10.96.0.10", 30080), endpoint_slice("web", ["10.244.1.2"])]


def converge(node: Node, variables, *, failing: bool = False):
    return node.role("service_proxy", {"service_proxy_mode": "nftables", **variables}, failing=failing)


def programmed(node: Node) -> str:
    """Return all that iptables and nftables hold, without counters."""
    programs = ("iptables-legacy-save", "ip6tables-legacy-save", "iptables-nft-save", "ip6tables-nft-save")
    texts = [node.output(program) for program in programs] + [node.output("nft", "-s", "list", "ruleset")]
    lines = [line for text in texts for line in text.splitlines() if not line.startswith("#")]
    return "\n".join(line.rsplit(" [", 1)[0] for line in lines)


def outcome_of(node: Node, state: int) -> str:
    return json.loads(node.output("cat", f"{HISTORY}/outcomes.json"))[str(state)]["outcome"]


def last_state(node: Node) -> int:
    names = node.output("ls", HISTORY).split()
    return max(int(name[6:12]) for name in names if name.startswith("state-"))


def timer_is(node: Node) -> str:
    return node.run("systemctl", "is-active", TIMER, check=False).stdout.strip()


def test_a_change_that_cuts_the_controller_off_is_reverted_at_once(node):
    """The controller's probe fails, and the node rolls back although most of the timeout is left."""
    before = programmed(node)
    # The Service claims the node's own address and management port for endpoints that do not exist.
    captured = service("captured", "10.96.0.77")
    captured["spec"]["externalIPs"] = [address_of(node)]
    captured["spec"]["ports"][0]["port"] = MANAGEMENT_PORT
    path = snapshot(node, captured, endpoint_slice("captured", ["192.0.2.1"]))
    failed = converge(
        node,
        {
            "service_proxy_snapshot": path,
            "service_proxy_confirm_timeout": LONG,
            # As the controller would do: check whether it can still connect.
            "service_proxy_probes": [f"tcp://{address_of(node)}:{MANAGEMENT_PORT}"],
            "service_proxy_probe_timeout": 3,
        },
        failing=True,
    )
    assert "not confirmed because probes failed" in failed.output and "the node rolls back to state" in failed.output
    wait_for(lambda: reachable(node), 240, what="the node is reachable again")
    wait_for(lambda: node.run("test", "-e", PENDING, check=False).returncode, 120, what="the revert is over")
    assert programmed(node) == before
    state = last_state(node) - 1  # The revert saved the state that it replaced.
    assert outcome_of(node, state) == "reverted"
    # The unit logs its result after it has recorded the outcome.
    wait_for(lambda: node.unit(SERVICE, "ActiveState") == {"ActiveState": "inactive"}, what="the unit has ended")
    assert "is reverted: state" in node.log(SERVICE)
    late = play([node], [{"kubenode.proxy.service_proxy_confirm": {"state": state}}], {}, failing=True)[node.name]
    assert "was not confirmed: the node has rolled back to it" in late.output
    wait_for(lambda: timer_is(node) == "inactive", what="the timer is stopped")


def test_an_unconfirmed_change_is_reverted_when_its_timeout_expires(node):
    before = programmed(node)
    snapshot(node, *web())
    node.copy(node.scratch / "snapshot.json", "/srv/snapshot.json")
    options = {"snapshot": "/srv/snapshot.json", "mode": "nftables", "node_name": node.name, "confirm_timeout": 10}
    assert play([node], [{"kubenode.proxy.service_proxy": options}], {})[node.name].changed == 1
    wait_for(lambda: node.run("test", "-e", PENDING, check=False).returncode, 120, what="the revert is over")
    assert programmed(node) == before
    assert outcome_of(node, last_state(node) - 1) == "reverted"


def test_a_confirmed_change_stays_and_confirming_again_changes_nothing(node):
    path = snapshot(node, *web())
    variables = {"service_proxy_snapshot": path, "service_proxy_confirm_timeout": LONG}
    recap = converge(node, variables)
    assert any("Confirm the change if all probes succeed" in task for task in recap.changed_tasks)
    assert timer_is(node) != "active"
    assert node.run("test", "-e", PENDING, check=False).returncode != 0
    state = last_state(node)
    assert outcome_of(node, state) == "confirmed"
    assert "10.96.0.10" in programmed(node)
    again = play([node], [{"kubenode.proxy.service_proxy_confirm": {"state": state}}], {})[node.name]
    assert again.changed == 0
    # Nothing differs now, so nothing is saved, armed or confirmed.
    assert converge(node, variables).changed == 0
    assert last_state(node) == state


def test_a_second_change_is_refused_while_one_is_pending_and_a_rollback_cancels_it(node):
    before = programmed(node)
    path = snapshot(node, *web())
    node.copy(node.scratch / "snapshot.json", "/srv/snapshot.json")
    options = {"snapshot": "/srv/snapshot.json", "mode": "nftables", "node_name": node.name}
    change = {"kubenode.proxy.service_proxy": {**options, "confirm_timeout": LONG}}
    assert play([node], [change], {})[node.name].changed == 1
    assert timer_is(node) == "active"
    refused = converge(node, {"service_proxy_snapshot": path}, failing=True)
    assert "waits to be confirmed until" in refused.output and "kubenode-proxy confirm" in refused.output
    # Its timer would stop the agent and the other timer.
    (node.scratch / "kubeconfig").write_text(KUBECONFIG)
    agent = {"agent_kubeconfig": str(node.scratch / "kubeconfig"), "agent_configuration": {"mode": "nftables"}}
    for role, variables in (("agent", agent), ("schedule", {"schedule_snapshot": path})):
        refused = node.role(role, variables, failing=True)
        said = f"{node.name}: a change waits to be confirmed, and is reverted otherwise"
        assert said in refused.output, refused.output
    assert node.run("test", "-e", "/usr/local/lib/kubenode-proxy", check=False).returncode != 0
    # Check mode only warns.
    assert play([node], [{"kubenode.proxy.service_proxy": options}], {}, "--check")[node.name].failed == 0
    state = last_state(node)
    run_playbook([node], "kubenode.proxy.rollback", _ROLLBACK, {})
    assert programmed(node) == before
    assert timer_is(node) != "active"
    assert outcome_of(node, state) == "rolled back"


def test_rollback_stops_and_reports_services_that_would_undo_it(node):
    before = programmed(node)
    converge(node, {"service_proxy_snapshot": snapshot(node, *web())})
    between = programmed(node)
    playbook = ("kubenode.proxy.rollback", _ROLLBACK, {})
    node.write("/run/systemd/system/kubenode-proxy.service", "[Service]\nExecStart=/usr/bin/sleep infinity\n")
    node.run("systemctl", "daemon-reload")
    node.run("systemctl", "start", "kubenode-proxy.service")
    try:
        stopped = '"stopped": ["kubenode-proxy.service"]'
        preview = run_playbook([node], *playbook, "--check", "-v")[node.name]
        assert stopped in preview.output and "table ip kube-proxy" in preview.output
        assert programmed(node) == between
        assert node.unit("kubenode-proxy.service", "ActiveState")["ActiveState"] == "active"
        assert stopped in run_playbook([node], *playbook, "-v")[node.name].output
        assert node.unit("kubenode-proxy.service", "ActiveState")["ActiveState"] == "inactive"
        assert programmed(node) == before
        assert run_playbook([node], *playbook)[node.name].changed == 0
    finally:
        node.run("rm", "-f", "/run/systemd/system/kubenode-proxy.service")
        node.run("systemctl", "daemon-reload")


@pytest.mark.full
def test_the_timer_of_scheduled_convergences_outlives_an_automatic_rollback(node):
    """Its settings are those from before the change. A convergence says whether it is stopped."""
    path, timer = snapshot(node, *web()), "kubenode-proxy-schedule.timer"
    node.copy(node.scratch / "snapshot.json", "/srv/snapshot.json")
    common = {"schedule_snapshot": "/srv/snapshot.json", "schedule_interval": "1h", "service_proxy_mode": "nftables"}
    node.role("schedule", common)
    before = programmed(node)
    given = {"service_proxy_snapshot": path, "service_proxy_mode": "iptables", "proxy_prepare_kernel": False}
    more = {"service_proxy_probes": ["tcp://192.0.2.1:9"], "service_proxy_probe_timeout": 2}
    more["service_proxy_confirm_timeout"] = LONG
    failed = run_playbook([node], "kubenode.proxy.converge", {**given, **more}, {}, failing=True)[node.name]
    assert "the node rolls back to state" in failed.output, failed.output
    wait_for(lambda: node.run("test", "-e", PENDING, check=False).returncode, 120, what="the revert is over")
    assert programmed(node) == before
    assert node.unit(timer, "ActiveState")["ActiveState"] == "active"
    given["service_proxy_mode"] = "nftables"
    for state, said in (
        ("start", "converges it again, with the settings of that role"),
        ("stop", "is stopped, so the"),
    ):
        node.run("systemctl", state, timer)
        done = run_playbook([node], "kubenode.proxy.converge", given, {})[node.name]
        assert f"The timer of the role schedule {said}" in done.output, done.output
    node.role("schedule", {**common, "schedule_state": "absent"})


@pytest.mark.full
def test_after_a_reboot_no_change_is_pending_and_a_late_confirmation_fails(node):
    snapshot(node, *web())
    node.copy(node.scratch / "snapshot.json", "/srv/snapshot.json")
    change = {"snapshot": "/srv/snapshot.json", "mode": "nftables", "node_name": node.name, "confirm_timeout": LONG}
    play([node], [{"kubenode.proxy.service_proxy": change}], {})
    state = last_state(node)
    node.restart()
    assert node.run("test", "-e", PENDING, check=False).returncode != 0
    assert timer_is(node) != "active"
    late = play([node], [{"kubenode.proxy.service_proxy_confirm": {"state": state}}], {}, failing=True)[node.name]
    assert "the node was rebooted" in late.output
    converge(node, {"service_proxy_snapshot": str(node.scratch / "snapshot.json")})
    assert "10.96.0.10" in programmed(node)
