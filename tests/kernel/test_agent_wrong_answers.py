# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A running agent against a TLS API server that answers wrongly at random: the agent recovers on its own."""

from __future__ import annotations

import json
import random
import threading
import urllib.parse
from typing import Optional

import pytest

from tests.apiserver.mutations import events_of, mutated, page_of
from tests.apiserver.store import KINDS
from tests.apiserver.wire import Answer
from tests.kernel.agent_node import AgentNode, HastyNode, cluster_ip, endpoint_slice, node_object, service
from tests.waiting import wait_for


class Wrong:
    """An answer hook that gives a number of wrong answers; ``done`` is set after the last one."""

    def __init__(self, node: AgentNode, answers: int) -> None:
        self.node = node
        self.left = answers
        self.rng = random.Random(answers)
        self.done = threading.Event()
        self._lock = threading.Lock()

    def wait(self, seconds: float = 60.0) -> None:
        """Wait for the last wrong answer. Raises AssertionError if there is none within this many seconds."""
        before = self.left + 1
        while not self.done.wait(seconds):
            assert self.left < before, f"the agent no longer asks; {self.left} wrong answers are left"
            before = self.left

    def __call__(self, target: str) -> Optional[Answer]:
        url = urllib.parse.urlsplit(target)
        if url.path not in KINDS:
            return None
        query = dict(urllib.parse.parse_qsl(url.query))
        with self._lock:
            if self.left <= 0:
                self.done.set()
                return None
            self.left -= 1
            number = self.rng.randrange(1, 6)
            if self.rng.random() < 0.2:
                self.node.store.put(endpoint_slice(number, self.rng.randint(1, 4)))
            store = self.node.store
            events = events_of(store, url.path, query.get("resourceVersion", ""))
            return mutated(page_of(store, url.path), events, query.get("watch") == "true", self.rng)


@pytest.mark.parametrize("answers", [60, pytest.param(500, marks=pytest.mark.full)])
def test_an_agent_recovers_from_wrong_answers(tmp_path, answers):
    node = HastyNode(tmp_path, "nftables")
    try:
        for number in range(1, 6):
            node.store.put(service(number))
            node.store.put(endpoint_slice(number))
        node.start()
        assert node.api is not None and node.process is not None
        wrong = Wrong(node, answers)
        node.api.wrong = wrong
        node.api.drop_watches()
        wrong.wait()
        node.api.wrong = None
        # Every object gets a new version and the watch history is dropped, so only a list shows the current objects.
        for number in range(1, 8):
            node.store.put(service(number))
            node.store.put(endpoint_slice(number, 3))
        node.store.put(node_object())
        node.store.compact()
        node.api.drop_watches()

        def serves_all() -> bool:
            """Return whether the kernel serves every Service with three endpoints and all watches are open."""
            families = node.status().get("families", {})
            counts = [families.get("IPv4", {}).get(name) for name in ("services", "endpoints")]
            return counts == [7, 21] and node.metric("kubenode_proxy_api_connected") == 1.0

        wait_for(serves_all, 60.0, 0.1)
        options = ("--config", str(tmp_path / "config.yaml"), "--kubeconfig", str(node.kubeconfig))
        difference = node.run("diff", *options)
        assert difference.returncode == 0, difference.stdout + difference.stderr
        assert all(cluster_ip(number) in node.kernel_text("") for number in range(1, 8))
        assert node.process.poll() is None
        assert json.loads(node.fetch("/livez", node.health_port))["healthy"] is True
        assert "a thread" not in node.log and "Traceback" not in node.log
        assert "can be read again" in node.log
    finally:
        node.close()
