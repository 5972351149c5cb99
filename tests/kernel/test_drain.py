# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A drained node loses no request: load balancers leave it, and what is left at the deadline is counted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Iterator

import pytest

from tests.kernel.drain_lab import ADDRESS, CLIENT, POD, PORT, DrainedNode, DrainLab, drain_lab, drained
from tests.lab import system
from tests.lab.load import Endpoint, Flow, Load
from tests.waiting import wait_for

FULL = pytest.mark.full
PATIENCE = 60.0
NOBODY = 65534
UNHEALTHY = {"lastUpdated", "currentTime", "nodeEligible", "healthy", "status"}


@pytest.fixture
def lab(tmp_path) -> Iterator[DrainLab]:
    with drain_lab(tmp_path) as found:
        yield found


def json_of(done) -> dict:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_a_drain_is_kept_over_restarts_and_shown_until_it_is_stopped(lab):
    node = lab.add_node(1, "nftables")
    refused = node.drain("start")
    assert refused.returncode == 4 and not node.file.exists()
    assert refused.stderr.startswith("kubenode-proxy: not drained: only a running agent answers health checks")
    assert len(refused.stderr.splitlines()) == 1
    node.start()
    code, body = node.service_health()
    assert node.health()[0] == code == 200

    assert node.drain("start", "--for", "1h").returncode == 0
    _expect_drained(node, body)
    assert node.agent.stop() == 0
    stopped = node.drain("status", "--json")
    assert stopped.returncode == 4 and json_of(stopped)["drained"] is True
    node.start()
    _expect_drained(node, body)
    shown = json_of(node.drain("status", "--json"))
    assert shown["drained"] is True and 3000 < shown["remainingSeconds"] <= 3600 and shown["connections"] == 0
    assert node.metric("kubenode_proxy_drained") == 1
    text = node.agent.run("status", "--control", str(node.agent.scratch / "agent.sock")).stdout
    assert "\ndrain:      drained since " in text

    assert node.drain("stop").stdout == "the drain is stopped: health checks succeed again\n"
    assert node.health()[0] == node.service_health()[0] == 200 and not node.file.exists()
    assert node.metric("kubenode_proxy_drained") == 0
    assert node.drain("stop").stdout == "the node was not drained\n"


def _expect_drained(node: DrainedNode, body: str) -> None:
    """Fail unless health checks fail in kube-proxy's forms, and the agent is alive."""
    code, text = node.health()
    answer = json.loads(text)
    assert code == 503 and set(answer) == UNHEALTHY
    assert answer["nodeEligible"] is False and answer["healthy"] is True
    assert node.health("/livez")[0] == 200
    # The endpoints exist and the proxy is healthy: only the status differs.
    assert node.service_health() == (503, body)


def test_a_drain_ends_by_itself(lab):
    node = lab.add_node(1, "nftables")
    node.start()
    assert node.drain("start", "--for", "2s").returncode == 0
    assert node.health()[0] == 503
    wait_for(lambda: node.health()[0] == node.service_health()[0] == 200, PATIENCE)
    wait_for(lambda: 'reason="it has expired"' in node.agent.log, PATIENCE)
    node.agent.stop()
    node.start()
    assert node.health()[0] == 200 and "the drain has expired" in node.agent.log


def test_a_file_that_root_did_not_write_is_no_drain(lab):
    node = lab.add_node(1, "nftables")
    good = json.dumps({"since": time.time() - 1, "until": time.time() + 600})
    other = node.file.with_name("other")
    other.write_text(good)
    os.mkfifo(node.file)
    # A FIFO without a writer blocks a program that opens it.
    node.start()
    assert node.health()[0] == 200 and "the drain file is ignored" in node.agent.log

    def of_nobody() -> None:
        node.file.write_text(good)
        os.chown(node.file, NOBODY, NOBODY)

    def writable() -> None:
        node.file.write_text(good)
        node.file.chmod(0o666)

    for make, reason in (
        (lambda: os.mkfifo(node.file), "is not a regular file"),
        (lambda: node.file.symlink_to(other), "is a symbolic link"),
        (lambda: os.link(other, node.file), "hard link"),
        (lambda: node.file.write_text(good[:-5]), "is damaged"),
        (lambda: node.file.write_text(good + " " * 5000), "larger than"),
        (of_nobody, f"belongs to user {NOBODY}"),
        (writable, "with mode 0666"),
    ):
        node.file.unlink()
        make()
        answer = drained(node, read=True)
        assert not answer["drained"] and reason in answer["problem"]
    assert node.health()[0] == 200
    # Root's command replaces whatever is there.
    assert node.drain("start").returncode == 0 and node.health()[0] == 503
    assert other.read_text() == good


#: A client that does not check health: it connects again and again, whether it is answered or not.
KNOCK = """
import socket, sys, time
while True:
    knock = socket.socket()
    knock.setblocking(False)
    knock.connect_ex((sys.argv[1], int(sys.argv[2])))
    time.sleep(0.3)
    knock.close()
"""


def _assert_unanswered_is_not_in_use(lab, node, variant):
    before = json_of(node.drain("status", "--json"))["connections"]
    iptables = ["nsenter", f"--net={lab.path('pod1')}", f"iptables-{variant or 'nft'}"]
    drop = ["INPUT", "-p", "tcp", "--syn", "-j", "DROP"]
    subprocess.run([*iptables, "-I", *drop], check=True)
    with system.socket_inside(lab.path("client"), socket.AF_INET, socket.SOCK_STREAM) as half_open:
        half_open.setblocking(False)
        half_open.connect_ex((node.address, PORT))
        time.sleep(0.3)
        assert json_of(node.drain("status", "--json"))["connections"] == before
    subprocess.run([*iptables, "-D", *drop], check=True)


@pytest.mark.parametrize(
    ("mode", "variant"),
    [
        pytest.param("nftables", "", id="nftables"),
        pytest.param("userspace", "", id="userspace"),
        pytest.param("iptables", "nft", marks=FULL, id="iptables"),
        pytest.param("ipvs", "legacy", marks=pytest.mark.uml, id="ipvs"),
    ],
)
def test_connections_at_the_deadline_are_counted(lab, mode, variant):
    node = lab.add_node(1, mode, variant)
    node.start()
    waiting = ("start", "--wait", "--deadline", "3s", "--quiet", "1s", "--json")
    with system.inside(lab.path("pod1")):
        server = socket.create_server((POD, 8080))
    with server, system.socket_inside(lab.path("client"), socket.AF_INET, socket.SOCK_STREAM) as client:
        client.connect((node.address, PORT))
        accepted = server.accept()[0]
        client.sendall(b"x")
        assert accepted.recv(1) == b"x"
        cut = node.drain(*waiting)
        assert cut.returncode == 5, cut.stderr
        found = json_of(cut)
        assert (found["outcome"], found["connections"], found["byProtocol"]) == ("deadline", 1, {"TCP": 1})
        assert found["left"] == [
            {
                "protocol": "TCP",
                "client": f"{CLIENT}:{client.getsockname()[1]}",
                "destination": f"{node.address}:{PORT}",
            }
        ]
        words = node.drain(*waiting[:-1]).stdout
        assert "1 external connection (1 TCP) in use, which are cut if the node stops serving now" in words
        knocking = subprocess.Popen(
            ["nsenter", f"--net={lab.path('client')}", sys.executable, "-c", KNOCK, node.address, str(PORT)]
        )
        try:
            words = node.drain(*waiting[:-1]).stdout
            assert f"new connections still begin, from {CLIENT} to :{PORT}; do these clients check healthz?" in words
            assert f"new connections still begin, from {CLIENT} to :{PORT}" in node.drain("status").stdout
        finally:
            knocking.kill()
            knocking.wait()
        if mode not in ("userspace", "ipvs"):
            # In those the node itself answers the client, or the kernel has states of its own.
            _assert_unanswered_is_not_in_use(lab, node, variant)
        # It was served all the time.
        accepted.sendall(b"y")
        assert client.recv(1) == b"y"
        accepted.close()
    ended = node.drain("start", "--wait", "--deadline", "60s", "--quiet", "1s", "--json")
    assert ended.returncode == 0 and json_of(ended)["outcome"] == "empty", ended.stdout
    assert node.drain("stop").returncode == 0


@pytest.mark.parametrize("rate", [pytest.param(60.0, id="short"), pytest.param(500.0, marks=FULL, id="500 a second")])
def test_no_request_is_lost_while_a_node_is_drained_and_rebooted(lab, rate):
    for number in (1, 2):
        lab.add_node(number, "nftables").start()
    balancer = lab.balance()
    wait_for(lambda: balancer.nodes == (1, 2), PATIENCE)
    node = lab.nodes[1]
    flow = Flow(lab.path("client"), "new", ADDRESS, PORT, rate, True)
    endpoints = [Endpoint(lab.path(f"pod{number}"), "tcp", "0.0.0.0", 8080) for number in (1, 2)]
    with Load([flow], endpoints) as load:
        load.settle(1)

        def answered(what: str) -> None:
            tally = load.take(1, int(rate / 2))
            print(f"{what}: {tally}")
            assert tally.problems == [] and tally.complete, f"{what}: {tally.problems[:10]}"

        answered("both nodes")
        done = node.drain("start", "--wait", "--deadline", "90s", "--quiet", "1s", "--json", timeout=150)
        assert done.returncode == 0 and balancer.nodes == (2,), done.stdout + done.stderr
        answered("drained")
        node.agent.stop()
        node.start()
        answered("the agent was restarted")
        assert balancer.nodes == (2,)
        node.agent.stop()
        system.ip_batch(["link set node1 down"])
        answered("the node is down")
        system.ip_batch(["link set node1 up"])
        system.ip_batch(["route replace default via 172.30.1.1"], f"drain{os.getpid()}-node1")
        node.start()
        answered("the node is up and still drained")
        assert balancer.nodes == (2,)
        assert node.drain("stop").returncode == 0
        wait_for(lambda: balancer.nodes == (1, 2), PATIENCE)
        answered("both nodes again")
        tally = load.rest()
        assert tally.problems == [] and tally.waiting == 0, tally.problems[:10]
