# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How often the agent reads the counters of the kernel, and what it answers."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import LimitedLog, Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.traffic import Traffic
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.traffic import account
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.traffic.account import Sample, connections_only
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortName
from tests.lab.clock import Clock

WEB = ServicePortName("shop", "web", "http", "TCP")
READING_SECONDS, DOCUMENT_SECONDS = 0.5, 0.25


class Mode:
    """A mode whose counters take long to read."""

    name, uncounted = "iptables", ""

    def __init__(self, clock: Clock) -> None:
        self.readings = 0
        self._clock = clock

    def traffic(self, *_arguments: object) -> list[Sample]:
        """Return the connections of one endpoint."""
        self.readings += 1
        self._clock.wait(READING_SECONDS)
        return [Sample("chain", WEB, where, connections_only(self.readings)) for where in ("", "10.0.0.1:80")]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def mode(clock: Clock) -> Mode:
    return Mode(clock)


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch, clock: Clock, mode: Mode) -> Traffic:
    """Provide the traffic of one ServicePort; each document takes long as well."""
    made = account.TrafficAccount.document

    def document(*arguments: Any, **more: Any) -> Any:
        clock.wait(DOCUMENT_SECONDS)
        return made(*arguments, **more)

    monkeypatch.setattr(account.TrafficAccount, "document", document)
    module = Traffic.__module__
    monkeypatch.setattr(f"{module}.Frontends", lambda _state, _context: SimpleNamespace(names=[WEB]))
    family = SimpleNamespace(family="IPv4", context=SimpleNamespace(node=None))
    proxiers = SimpleNamespace(mode=mode, families=[family])
    sync: Any = SimpleNamespace(syncer=SimpleNamespace(tables=SimpleNamespace()), proxiers=proxiers)
    view: Any = SimpleNamespace(state=None)
    handles: Any = None
    limited = LimitedLog(Log(io.StringIO()), clock=clock)
    return Traffic(sync, lambda: view, handles, timers=Timers(clock), limited=limited, now=clock)


def test_a_watcher_costs_the_agent_a_tenth_of_its_time(traffic: Traffic, mode: Mode, clock: Clock) -> None:
    known = traffic.document()["at"]
    began, readings = clock.now, mode.readings
    busy = 0.0
    while clock.now < began + 100:
        before = clock.now
        known = traffic.document(known=known)["at"]
        busy += clock.now - before
        clock.wait(0.1)
    assert mode.readings > readings
    assert busy < 12


def test_single_questions_cost_no_more_readings_than_a_watcher(traffic: Traffic, mode: Mode, clock: Clock) -> None:
    began = clock.now
    found = []
    while clock.now < began + 100:
        found.append(traffic.document())
        clock.wait(0.1)
    assert mode.readings * READING_SECONDS < 12
    # Each answer has the time of its reading, and the next one is not missed.
    assert len({item["at"] for item in found}) == mode.readings
    assert [item["ports"][0]["connections"] for item in found] == sorted(
        item["ports"][0]["connections"] for item in found
    )
    mode.name = "ipvs"
    assert traffic.document()["mode"] == "ipvs"


def test_a_reading_that_the_caller_has_is_not_sent_again(traffic: Traffic, mode: Mode, clock: Clock) -> None:
    first = traffic.document()
    assert traffic.document(known=first["at"]) == {"at": first["at"]}
    # Another watcher has an older one.
    assert traffic.document(known=first["at"] - 1)["ports"] == first["ports"]
    assert mode.readings == 1
    clock.wait(60)
    assert traffic.document(known=first["at"])["ports"][0]["connections"] == 2


def test_endpoints_are_sent_on_request(traffic: Traffic) -> None:
    assert [item["endpoint"] for item in traffic.document()["ports"][0]["endpoints"]] == ["10.0.0.1:80"]
    assert traffic.document(endpoints=False)["ports"][0]["endpoints"] == []
