# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many requests a reflector sends to a misbehaving API server; with injected time."""

from __future__ import annotations

import random

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Backoff
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError
from tests.apiserver.wire import Answer, broken, failure, head, response, silent
from tests.unit.agent.scripted_reflector import Run, bookmark, event, events, page, service


def paced(moments):
    """Check the backoff up to half a minute: some 25 requests in ten minutes, at least a second apart."""
    pauses = [later - earlier for earlier, later in zip(moments, moments[1:])]
    assert len(moments) <= 30 and min(pauses) >= 0.8 and pauses[-2] >= 15.0, pauses


@pytest.mark.parametrize(
    "watch",
    [
        pytest.param(lambda query: failure(410), id="410"),
        pytest.param(
            lambda query: events({"type": "ERROR", "object": {"kind": "Status", "code": 410}}), id="410 as an event"
        ),
        pytest.param(lambda query: events(bookmark("3")), id="an older version"),
        pytest.param(lambda query: events(), id="closed at once"),
        pytest.param(lambda query: broken(), id="broken at once"),
        pytest.param(lambda query: [head("200 OK", {"Transfer-Encoding": "chunked"}), broken()], id="broken"),
        pytest.param(lambda query: failure(500), id="500"),
        pytest.param(lambda query: failure(504), id="504"),
        pytest.param(lambda query: events(b"{\n"), id="no JSON"),
        pytest.param(lambda query: events({"type": "ERROR", "object": {"code": []}}), id="an odd error"),
        pytest.param(
            lambda query: events({"type": "ERROR", "object": {"code": "x", "message": 5}}), id="an odd message"
        ),
    ],
)
def test_a_watch_without_events_is_repeated_with_backoff(watch):
    run = Run(lambda query: page([service("a")]), watch).go()
    paced(run.watches)
    assert len(run.lists) <= 30 and run.names == ["a"]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(failure(410), id="410"),
        pytest.param(failure(500), id="500"),
        pytest.param(broken(), id="broken"),
        pytest.param(silent(), id="silent"),
        pytest.param(response(b"[]"), id="no object"),
        pytest.param(response(b"{}"), id="no list"),
        pytest.param(response(b'{"kind":"PodList","metadata":{"resourceVersion":"1"},"items":[]}'), id="another kind"),
        pytest.param(response(b'{"kind":"ServiceList","metadata":{},"items":[]}'), id="no version"),
        pytest.param(page([5, None, {}, {"metadata": []}]), id="nothing of use"),
        pytest.param(response(b"[" * 200000), id="nested"),
        pytest.param(response(b"<html>"), id="HTML"),
        pytest.param(response(b'{"kind":"ServiceList","x":' + b"9" * 5000 + b"}"), id="a huge number"),
    ],
)
def test_an_invalid_list_is_repeated_with_backoff_and_changes_nothing(answer):
    run = Run(lambda query: answer, lambda query: events())
    run.limit = 120
    run.go()
    pauses = [later - earlier for earlier, later in zip(run.lists, run.lists[1:]) if later > earlier]
    assert len(pauses) <= 30 and pauses[-2] >= 15.0 and not run.watches
    assert run.view.listed == set() and run.log.count("level=warning") <= 6


def test_steady_watches_are_continued_at_once():
    def watch(query):
        return Answer(*events(bookmark("10"))[:-1], 300.0, b"0\r\n\r\n")

    run = Run(lambda query: page([service("a")]), watch).go(3600.0)
    assert len(run.lists) == 1 and len(run.watches) >= 12


def test_a_watch_with_changes_is_continued_after_a_second():
    versions = iter(range(11, 10000))
    run = Run(
        lambda query: page([service("a")]),
        lambda query: events(event("MODIFIED", service("a", str(next(versions))))),
    ).go(60.0)
    assert len(run.lists) == 1 and 55 <= len(run.watches) <= 62


def test_a_version_that_only_the_previous_server_knew_is_dropped():
    """A bookmark from the future, as from a server before its restore from a backup: 504, then a list."""

    def watch(query):
        return events(bookmark("99999")) if query["resourceVersion"] == "10" else failure(504, "Timeout")

    def whole(query):
        return failure(504, "Timeout") if query.get("resourceVersion") == "99999" else page([service("a")])

    run = Run(whole, watch)
    run.go(60.0)
    assert run.names == ["a"] and len(run.lists) >= 2


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("code", [400, 500])
def test_a_version_that_the_next_server_cannot_read_is_dropped(code, lists):
    """As kube-apiserver 1.36.2 answers it: a list with 400, a watch with 500."""
    text = 'resourceVersion: Invalid value: "a.1": strconv.ParseUint: parsing "a.1": invalid syntax'
    replaced = False

    def watch(query):
        nonlocal replaced
        if query["resourceVersion"] != "a.1":
            return Answer(*events()[:-1], 200.0, b"0\r\n\r\n")
        if replaced:
            return failure(code, "", message=text)
        replaced = True
        if lists:
            run.reflector.list_again([])
        return events()

    def whole(query):
        version = query.get("resourceVersion")
        if version == "a.1":
            return failure(400, "BadRequest", message=f"invalid resource version: {text}")
        return page([service("b")]) if replaced else page([service("a")], version="a.1")

    run = Run(whole, watch)
    run.go(60.0)
    assert run.names == ["b"] and run.reflector.error == ""


def test_an_unexpected_failure_drops_the_version():
    """The supervisor calls the body again; it must not receive the same event once more."""
    run = Run(lambda query: page([service("a")]), lambda query: events(event("ADDED", service("b", "12"))))
    run.reflector._apply = lambda found: 1 // 0
    with pytest.raises(ZeroDivisionError):
        run.go(1.0)
    assert run.reflector._version == "" and not run.reflector.connected
    del run.reflector._apply
    run.go(1.0)
    assert run.names == ["a", "b"] and len(run.lists) == 2


def test_failures_are_logged_once_and_recovery_as_information():
    answers = iter([failure(500)] * 5 + [page([service("a")])])
    run = Run(lambda query: next(answers), lambda query: Answer(*events()[:-1], 200.0, b"0\r\n\r\n"))
    run.go(300.0)
    lines = run.log.splitlines()
    assert [line.split()[0] for line in lines] == ["level=warning", "level=info"]
    assert "services of the API server can be read again" in lines[1]


def test_the_first_request_waits_for_the_given_pause_and_is_noted():
    run = Run(lambda query: page(), lambda query: events())
    run.reflector._first_pause = 0.7
    assert run.reflector.requested_at is None
    started = run.clock.now
    run.go(1.0)
    assert run.reflector.requested_at == run.lists[0] == started + 0.7


def test_backoff_differs_between_agents():
    pauses = {tuple(round(backoff.pause(), 6) for _turn in range(3)) for backoff in (Backoff() for _agent in range(20))}
    assert len(pauses) == 20
    assert all(0.8 <= first <= 1.6 for first, _second, _third in pauses)
    assert random.random() != random.random()


def test_the_prelude_comes_before_the_first_list_and_is_repeated_until_it_succeeds():
    run = Run(lambda query: page([service("a")]), lambda query: events())
    calls = []

    def prelude(client):
        calls.append(len(run.lists))
        if len(calls) < 3:
            raise ApiError("cannot be reached")

    run.reflector._prelude = prelude
    run.go(20.0)
    assert calls == [0, 0, 0] and run.names == ["a"]
