# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lines of ``top``: sorted, with rates, in 80 columns."""

from __future__ import annotations

import io
import json

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.command import result, top_command
from ansible_collections.kubenode.proxy.plugins.module_utils.command.cli import Streams, main
from ansible_collections.kubenode.proxy.plugins.module_utils.command.top_command import (
    busiest,
    rated,
    short,
    traffic_lines,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.agent_client import NoAgent

EMPTY = dict.fromkeys(("connections", "packetsIn", "packetsOut", "bytesIn", "bytesOut", "active", "inactive"))


def port(name: str, endpoints: tuple = (), family: str = "IPv4", protocol: str = "TCP", **numbers: object) -> dict:
    found = {"namespace": "shop", "name": name, "port": "http", "protocol": protocol, "family": family}
    return {**found, **EMPTY, "resetAt": 0, **numbers, "endpoints": list(endpoints)}


def reading(*ports: dict, at: float = 0.0) -> dict:
    times = {"since": 0.0, "at": at, "monotonic": at}
    return {"node": "node1", "mode": "ipvs", "uncounted": "", **times, "ports": list(ports)}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (0.0, "0.0"),
        (1.5, "1.5"),
        (99_999, "99999"),
        (100_000, "100.0k"),
        (999_949, "999.9k"),
        (999_951, "1.0M"),
        (12_345_678, "12.3M"),
        (2**63, "9.2E"),
    ],
)
def test_numbers_have_at_most_six_characters(value, text):
    assert short(value) == text
    assert len(text) <= 6


def test_rates_are_between_readings():
    item = {**EMPTY, "endpoint": "10.0.0.1:80", "connections": 4, "resetAt": 0}
    before = reading(port("web", (item,), connections=10, packetsIn=100, packetsOut=90), at=100.0)
    after = reading(
        port("web", ({**item, "connections": 9},), connections=20, packetsIn=150, packetsOut=95), port("new"), at=102.0
    )
    web, new = rated(after, before)["ports"]
    assert web["perSecond"]["connections"] == 5.0
    assert (web["perSecond"]["packetsIn"], web["perSecond"]["bytesIn"]) == (25.0, None)
    assert web["endpoints"][0]["perSecond"]["connections"] == 2.5
    assert set(new["perSecond"].values()) == {None}
    # The same reading again has no rate.
    assert set(rated(after, after)["ports"][0]["perSecond"].values()) == {None}


def test_totals_that_begin_again_have_no_rate():
    before = reading(port("web", connections=100, bytesIn=10), port("db", connections=5), at=100.0)
    # The Service web was removed and created again.
    after = reading(port("web", connections=3, bytesIn=20), port("db", connections=9), at=102.0)
    web, database = rated(after, before)["ports"]
    assert (web["perSecond"]["connections"], database["perSecond"]["connections"]) == (None, 2.0)
    # Another mode, or an agent that was restarted, counts something else.
    after["since"] = 101.0
    assert [row["perSecond"]["connections"] for row in rated(after, before)["ports"]] == [None, None]


def test_busiest_ports_are_first_and_others_are_counted():
    document = reading(port("a", connections=1), port("b", connections=9), port("c"))
    found = busiest(document, 2)
    assert [row["name"] for row in found["ports"]] == ["b", "a"]
    assert found["notShown"] == 1
    assert [row["name"] for row in busiest(document, 0)["ports"]] == ["b", "a", "c"]


def test_lines_fit_a_terminal():
    item = {**EMPTY, "endpoint": "[fd00:10:244:1234:5678:9abc:def0:1234]:8080", "resetAt": 0, "connections": 3}
    document = reading(
        port("a-service-with-a-very-long-name-indeed", (item,), connections=2**40, bytesIn=2**60, active=7),
        port("dns", protocol="UDP", family="IPv6", resetAt=1_700_000_000.0),
    )
    document["uncounted"] = "iptables mode counts connections only: no rule sees their other packets"
    for watching in (False, True):
        shown = rated(document, {**document, "at": -1.0}) if watching else document
        lines = traffic_lines(busiest(shown, 20), watching, endpoints=True)
        assert all(len(line) <= 80 for line in lines), lines
    text = "\n".join(traffic_lines(busiest(document, 20), False, endpoints=False))
    assert "shop/dns:http/udp IPv6*" in text
    assert "last at 2023-11-14T22:13:20Z" in text.replace("\n", " ")
    assert "- is not counted: iptables mode" in text
    assert "fd00" not in text


@pytest.mark.parametrize(
    ("name", "protocol", "shown"),
    [
        ("udp", "UDP", "shop/dns:udp "),
        ("udp", "TCP", "shop/dns:udp/tcp "),
        ("tcp", "UDP", "shop/dns:tcp/udp "),
        ("tcp", "TCP", "shop/dns:tcp "),
        ("", "UDP", "shop/dns/udp "),
    ],
)
def test_the_protocol_is_shown_unless_the_name_of_the_port_says_it(name, protocol, shown):
    found = {**port("dns", protocol=protocol, connections=1), "port": name}
    assert f"{shown} " in "\n".join(traffic_lines(busiest(reading(found), 20), False, endpoints=False))


def test_without_any_count_one_sentence_takes_the_place_of_the_table():
    document = {
        **reading(port("web"), port("dns", protocol="UDP")),
        "uncounted": "counting is off: set traffic.connections",
    }
    _head, text = traffic_lines(busiest(document, 20), False, endpoints=True)
    assert text == "no Service is counted: counting is off: set traffic.connections"


def run(*words: str) -> tuple:
    streams = Streams(io.StringIO(), io.StringIO())
    return main(["top", *words], streams), streams.output.getvalue(), streams.errors.getvalue()


def test_the_command_asks_the_agent(monkeypatch):
    asked = []

    def ask(_path, question):
        asked.append(question)
        return reading(port("web", connections=3))

    monkeypatch.setattr(result, "ask_agent", ask)
    code, output, _errors = run("--namespace", "shop")
    assert (code, output.splitlines()[2].split()[:2]) == (0, ["shop/web:http", "3"])
    question = {"command": "traffic", "namespace": "shop", "endpoints": False, "known": None}
    assert asked == [question]
    assert json.loads(run("--json")[1])["ports"][0]["connections"] == 3
    assert asked[1] == {**question, "namespace": "", "endpoints": True}


def test_watching_ends_with_an_interrupt_and_prints_one_object_a_line_as_json(monkeypatch):
    readings = [reading(port("web", connections=count), at=float(count)) for count in (1, 3)]
    monkeypatch.setattr(result, "ask_agent", lambda _path, _question: readings.pop(0))
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if not readings:
            raise KeyboardInterrupt

    monkeypatch.setattr(top_command.time, "sleep", sleep)
    code, output, _errors = run("--watch", "0.5", "--json")
    first, second = (json.loads(line) for line in output.splitlines())
    assert (code, slept) == (0, [0.5, 0.5])
    assert first["ports"][0]["perSecond"]["connections"] is None
    assert second["ports"][0]["perSecond"]["connections"] == 1.0


def test_a_reading_that_is_known_is_shown_again(monkeypatch):
    answers = [reading(port("web", connections=7), at=5.0), {"node": "node1", "at": 5.0}]
    asked = []

    def ask(_path, question):
        asked.append(question["known"])
        return answers.pop(0)

    def sleep(_seconds):
        if not answers:
            raise KeyboardInterrupt

    monkeypatch.setattr(result, "ask_agent", ask)
    monkeypatch.setattr(top_command.time, "sleep", sleep)
    code, output, _errors = run("--watch")
    assert (code, asked, output.count("shop/web:http")) == (0, [None, 5.0], 2)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (NoAgent("no agent answers"), 4, "only a running agent"),
        (ProxyError("unknown command 'traffic'"), 1, "too old to report traffic"),
        (ProxyError("the agent does not know the cluster yet"), 1, "does not know the cluster"),
    ],
)
def test_failures_have_an_exit_code_and_one_line(monkeypatch, error, code, text):
    def ask(_path, _question):
        raise error

    monkeypatch.setattr(result, "ask_agent", ask)
    found, _output, errors = run()
    assert found == code
    assert text in errors
    assert errors.count("\n") == 1


def test_an_invalid_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(result, "ask_agent", lambda _path, _question: {"ports": [{}]})
    code, _output, errors = run()
    assert (code, "not valid" in errors) == (1, True)


@pytest.mark.parametrize("words", [("--watch", "0"), ("--limit", "-1"), ("--watch", "99999")])
def test_impossible_values_are_refused(words):
    assert run(*words)[0] == 2
