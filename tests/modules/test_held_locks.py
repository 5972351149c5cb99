# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A lock that another program never releases: each command and module ends in time, and names the program."""

from __future__ import annotations

import json
import time
from typing import Iterator

import pytest

from tests.lab.background import lock_holder
from tests.lab.cluster import SNAPSHOT
from tests.lab.namespaces import ROOT
from tests.modules.file_faults import CONFIGURATION, DOCUMENT, NODE, FaultyNode, command, module

OWN, XTABLES = "/run/kubenode-proxy/lock", "/run/xtables.lock"
#: How long programs wait for these locks, in seconds: by the option that is given here, and always.
WAITS = {OWN: 1, XTABLES: 5}
#: How long a busy machine may take for the rest.
SPARE = 20.0
MODE = "iptables"
GIVEN = ("--snapshot", str(SNAPSHOT), "--node-name", NODE, "--mode", MODE, "--config", "/run/config.json")
SERVED = {"snapshot": str(SNAPSHOT), "node_name": NODE, "mode": MODE, "configuration": CONFIGURATION}
PATIENT = ("--lock-timeout", str(WAITS[OWN]))
CHANGING = {
    "converge": command("converge", *GIVEN, *PATIENT),
    "cleanup": command("cleanup", "--config", "/run/config.json", *PATIENT),
    "rollback": command("rollback", "--accept-loss", *PATIENT),
    "service_proxy": module("service_proxy", **SERVED, lock_timeout=WAITS[OWN]),
    "service_proxy absent": module("service_proxy", state="absent", lock_timeout=WAITS[OWN]),
    "service_proxy_rollback": module("service_proxy_rollback", accept_loss=True, lock_timeout=WAITS[OWN]),
}
#: Without a lock of ours, since they only read. Some of them list rules, for which iptables takes its lock.
READING = {
    "diff": command("diff", *GIVEN),
    "explain": command("explain", "10.96.0.10:53", *GIVEN),
    "status": command("status", *GIVEN),
    "preflight": command("preflight", "--config", "/run/config.json"),
    "cleanup check": command("cleanup", "--check", "--config", "/run/config.json"),
    "service_proxy_info": module("service_proxy_info", **SERVED),
    "iptables_chains_info": module("iptables_chains_info", table="filter"),
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyNode]:
    """Provide a node with legacy iptables that serves, except for the rules of one chain."""
    made = FaultyNode(tmp_path_factory.mktemp("node"))
    made.shell(f"cat >/run/config.json <<'END'\n{json.dumps(DOCUMENT)}\nEND")
    for program in ("iptables-legacy", "ip6tables-legacy"):
        made.shell(f"{program} -t mangle -N KUBE-IPTABLES-HINT")
    outcome = made.run(command("converge", *GIVEN))
    assert outcome.ok, outcome
    made.shell("iptables-legacy -t nat -F KUBE-SERVICES")
    yield made
    made.close()


def chains(node: FaultyNode) -> str:
    """Return the rules of the node."""
    return node.shell("iptables-legacy-save | grep -v '^[#:]'; ip6tables-legacy-save | grep -v '^[#:]'")


def say(node: FaultyNode, lock: str, name: str) -> None:
    """Run a program while the lock is held, and check when and how it ends."""
    with lock_holder(lock, enter=node.enter(ROOT)) as held:
        began = time.monotonic()
        outcome = node.run({**CHANGING, **READING}[name])
        seconds = time.monotonic() - began
    assert seconds < WAITS[lock] + SPARE, (name, seconds)
    if name in CHANGING or "held by" in outcome.said:
        unit = f"{WAITS[lock]} seconds"
        assert not outcome.ok and "\n" not in outcome.said, outcome
        for part in (lock, f"held by process {held.pid} (sleep)", unit, "end it"):
            assert part in outcome.said, (part, outcome)
    if name in READING and lock == OWN:
        assert "held by" not in outcome.said, outcome


@pytest.mark.parametrize(
    ("lock", "name"),
    [
        pytest.param(lock, name, marks=() if (lock, name) == (OWN, "rollback") else pytest.mark.full)
        for lock in WAITS
        for name in (*CHANGING, *READING)
    ],
)
def test_a_lock_that_is_held_for_ever_ends_a_run_in_time(node: FaultyNode, lock: str, name: str) -> None:
    before = chains(node)
    say(node, lock, name)
    assert chains(node) == before
