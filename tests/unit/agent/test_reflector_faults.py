# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many requests a reflector sends to a misbehaving API server, and how much it reads; with injected time."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import random
import subprocess
import urllib.parse

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.reflector import Reflector
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView, small
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.supervision import Backoff
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.surface.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster import api
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.access.exec_plugin import ExecPlugin, ExecSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.connection import Access, ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.resource_types import SERVICES
from tests.apiserver.wire import Answer, Wire, broken, chunked, failure, head, response, silent
from tests.lab.clock import Clock

HOST = "http://api.example"


class Quiet:
    """A stand-in for the supervised thread."""

    def busy(self, seconds):
        """Ignore deadlines, which these tests do not check."""

    def idle(self):
        """Ignore idleness as well."""


def service(name, version="5", **metadata):
    return {
        "metadata": {"namespace": "default", "name": name, "resourceVersion": version, **metadata},
        "spec": {"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ports": [{"port": 80}]},
    }


def page(items=(), version="10", **metadata):
    body = {"kind": "ServiceList", "apiVersion": "v1", "metadata": {"resourceVersion": version, **metadata}}
    return response(json.dumps({**body, "items": list(items)}).encode())


def events(*items):
    return chunked(item if isinstance(item, bytes) else json.dumps(item).encode() + b"\n" for item in items)


def event(kind, item):
    return {"type": kind, "object": {"kind": "Service", "apiVersion": "v1", **item}}


def bookmark(version):
    return {"type": "BOOKMARK", "object": {"kind": "Service", "metadata": {"resourceVersion": version}}}


def query_of(target):
    return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(target).query))


class Run:
    """A reflector against scripted answers, until a number of seconds or requests has passed."""

    def __init__(self, list_answer, watch_answer):
        self.clock = Clock()
        self.end = self.clock.now
        self.stream = io.StringIO()
        self.view = ClusterView()
        self.lists, self.watches = [], []
        self.limit = 3000
        self._list, self._watch = list_answer, watch_answer
        self.wire = Wire(self.clock, self.answer)
        connection = ApiConnection(host=HOST)
        self.reflector = Reflector(
            SERVICES,
            lambda expect: ApiClient(
                connection, sleep=self.clock.wait, expect=expect, dial=self.wire.dial, clock=self.clock
            ),
            self.view.apply,
            Log(self.stream),
            reduce=small,
            backoff=lambda: Backoff(lambda: 0.5),
            clock=self.clock,
            wait=self.wait,
        )

    def answer(self, target):
        query = query_of(target)
        watch = query.get("watch") == "true"
        (self.watches if watch else self.lists).append(self.clock.now)
        if self.clock.now >= self.end:
            self.reflector._ending.set()
        made = len(self.lists) + len(self.watches)
        assert made < self.limit, "too many requests"
        found = (self._watch if watch else self._list)(query)
        return found if isinstance(found, Answer) else Answer(*(found if isinstance(found, list) else [found]))

    def wait(self, seconds):
        self.clock.wait(seconds)
        if self.clock.now >= self.end:
            self.reflector._ending.set()

    def go(self, seconds=600.0):
        self.end = self.clock.now + seconds
        self.reflector.run(Quiet())
        return self

    @property
    def names(self):
        return sorted(key.name for key in self.view.state.services)

    @property
    def log(self):
        return self.stream.getvalue()


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


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "more than 50 pages are incomplete without being the last"),
        ([service("a")], "more than 50 pages are incomplete without being the last"),
        ([service(f"s{number}") for number in range(500)], "the list has more than 20 pages"),
    ],
)
def test_an_endless_list_is_abandoned(items, message, monkeypatch):
    monkeypatch.setattr(api, "_MOST_PAGES", 20 if items[1:] else api._MOST_PAGES)
    answer = page(items, **{"continue": "more"})
    run = Run(lambda query: answer, lambda query: events())
    run.go(1.0)
    assert message in run.log and len(run.lists) <= 51
    assert run.view.listed == set()


class Sized:
    """Bytes that are generated as they are read."""

    def __init__(self, total):
        self.total = total

    def parts(self):
        return [b"x" * 65536] * (self.total // 65536 + 1)


def test_a_line_of_a_watch_is_bounded_and_read_in_linear_time():
    run = Run(
        lambda query: page([service("a")]),
        lambda query: [head("200 OK", {}), *Sized(9 << 20).parts()],
    )
    run.go(1.0)
    assert "watch services: an event is larger than 8 MiB" in run.log


def test_a_large_event_below_the_limit_is_accepted():
    large = service("large", "11", annotations={"x": "y" * (7 << 20)})
    run = Run(lambda query: page(), lambda query: events(event("ADDED", large)))
    run.go(1.0)
    assert run.names == ["large"] and "warning" not in run.log


def test_a_page_is_bounded_also_when_it_is_compressed():
    bomb = gzip.compress(b'{"kind":"ServiceList","x":"' + b" " * (200 << 20) + b'"}', 1)
    run = Run(lambda query: response(bomb, headers={"Content-Encoding": "gzip"}), lambda query: events())
    run.go(0.1)
    assert "list services: the answer is larger than 64 MiB" in run.log


def test_compressed_pages_are_read_and_damaged_ones_refused():
    body = json.dumps(
        {"kind": "ServiceList", "apiVersion": "v1", "metadata": {"resourceVersion": "10"}, "items": [service("a")]}
    ).encode()
    packed = gzip.compress(body)
    answers = iter([packed[:-9], b"\x1f\x8b" + packed[2:-20] + b"garbage" * 3, packed])
    run = Run(lambda query: response(next(answers), headers={"Content-Encoding": "gzip"}), lambda query: events())
    run.go(6.0)
    assert run.names == ["a"] and "truncated" in run.log


def test_an_answer_that_arrives_too_slowly_is_abandoned():
    dripping = [head("200 OK", {}), *(part for _turn in range(400) for part in (b" ", 5.0))]
    run = Run(lambda query: list(dripping), lambda query: events())
    run.go(100.0)
    assert "timed out before the end of the answer" in run.log


ODD = [
    5,
    "text",
    ["list"],
    None,
    {},
    {"metadata": 5},
    {"metadata": []},
    {"metadata": {"name": 5}},
    {"metadata": {"name": ""}},
    {"metadata": {"name": "x", "namespace": {}}},
    {"metadata": {"name": "n" * 300}},
    {"metadata": {"name": "pod"}, "kind": "Pod"},
    {"metadata": {"name": "pod"}, "kind": 7},
]


def test_items_without_an_identity_are_skipped_and_the_others_served():
    run = Run(lambda query: page([service("a"), *ODD, service("b")]), lambda query: events())
    run.go(60.0)
    assert run.names == ["a", "b"]
    left_out = [line for line in run.log.splitlines() if "skipped an object of the API server" in line]
    assert len(left_out) == len(set(left_out)) >= 8
    assert any("Service default/pod" in line or "Service pod: kind" in line for line in left_out)


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "NOVEL", "", 5, None])
@pytest.mark.parametrize("odd", [item for item in ODD if isinstance(item, dict)], ids=json.dumps)
def test_a_watch_continues_after_a_malformed_event(kind, odd):
    stream = events({"type": kind, "object": odd}, event("ADDED", service("b", "12")))
    run = Run(lambda query: page([service("a")]), lambda query: stream)
    run.go(0.5)
    assert run.names == ["a", "b"]
    assert len(run.lists) == len(run.watches) == 1


@pytest.mark.parametrize(
    "line",
    [
        b"5",
        b"null",
        b'{"type":"ADDED"}',
        b'{"type":"ADDED","object":[]}',
        b"\xff\xfe{}",
        b'{"type":"ADDED","object":{"metadata":' + b"[" * 100000 + b"]" * 100000 + b"}}",
        b'{"type":"ADDED","object":{"x":' + b"9" * 5000 + b"}}",
        b'{"type":"ERROR","object":{"code":"410"}}',
        b'{"type":"ERROR","object":{"code":[]}}',
        b'{"type":"ERROR","object":{"code":-1,"message":["x"]}}',
    ],
)
def test_after_an_event_that_cannot_be_read_the_collection_is_listed_again(line):
    lists = iter([page([service("a")]), page([service("a"), service("b", "11")], "11")])
    watches = iter([events(line + b"\n")])
    run = Run(lambda query: next(lists), lambda query: next(watches, silent()))
    run.go(3.0)
    assert run.names == ["a", "b"] and len(run.lists) == 2


def test_a_version_that_only_the_previous_server_knew_is_dropped():
    """A bookmark from the future, as from a server before its restore from a backup: 504, then a list."""

    def watch(query):
        return events(bookmark("99999")) if query["resourceVersion"] == "10" else failure(504, "Timeout")

    def whole(query):
        return failure(504, "Timeout") if query.get("resourceVersion") == "99999" else page([service("a")])

    run = Run(whole, watch)
    run.go(60.0)
    assert run.names == ["a"] and len(run.lists) >= 2


def test_a_defect_in_reading_one_object_costs_only_this_object():
    def reduce(item):
        if item["metadata"]["name"] == "bad":
            raise ZeroDivisionError("a defect")
        return small(item)

    run = Run(lambda query: page([service("a"), service("bad"), service("c")]), lambda query: events())
    run.reflector._reduce = reduce
    run.go(60.0)
    assert run.names == ["a", "c"]
    assert "Service default/bad: ZeroDivisionError" in run.log


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


def test_credentials_that_expire_each_hour_are_renewed_for_half_a_day(monkeypatch):
    """A plugin's tokens live an hour, and only the latest is valid: no answer is 401, no list repeated."""

    def plugin(words, **options):
        issued.append(clock.now)
        expiry = datetime.datetime.fromtimestamp(clock.now + 3600, datetime.timezone.utc)
        status = {"token": f"token-{len(issued)}", "expirationTimestamp": expiry.strftime("%Y-%m-%dT%H:%M:%SZ")}
        credential = {"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": status}
        return subprocess.CompletedProcess(words, 0, json.dumps(credential).encode(), b"")

    def valid():
        return f"Bearer token-{len(issued)}".encode() in run.wire.sent and clock.now < issued[-1] + 3600

    issued = []
    run = Run(
        lambda query: page([service("a")]) if valid() else failure(401, "Unauthorized"),
        lambda query: (
            Answer(*events(bookmark("10"))[:-1], float(query["timeoutSeconds"]), b"0\r\n\r\n")
            if valid()
            else failure(401, "Unauthorized")
        ),
    )
    clock = run.clock
    credentials = ExecPlugin(ExecSettings("client.authentication.k8s.io/v1", "plugin"), now=clock, run=plugin)
    monkeypatch.setattr(api, "resolve", lambda connection: Access(HOST, credentials))
    run.go(12 * 3600.0)
    assert 11 <= len(issued) <= 12 and len(run.lists) == 1 and len(run.watches) > 72
    assert run.log == ""


def test_a_revoked_token_fails_one_request_and_is_replaced_by_the_renewed_one(monkeypatch):
    """Without an expiry the server's 401 is the only sign; it makes the plugin run again."""
    issued, good = [], [1]

    def plugin(words, **options):
        issued.append(clock.now)
        credential = {"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1"}
        credential["status"] = {"token": f"token-{len(issued)}"}
        return subprocess.CompletedProcess(words, 0, json.dumps(credential).encode(), b"")

    def watch(query):
        if f"Bearer token-{good[0]}".encode() not in run.wire.sent:
            return failure(401, "Unauthorized")
        if len(run.watches) == 5:
            good[0] = 2
        return Answer(*events(bookmark("10"))[:-1], float(query["timeoutSeconds"]), b"0\r\n\r\n")

    run = Run(lambda query: page([service("a")]), watch)
    clock = run.clock
    credentials = ExecPlugin(ExecSettings("client.authentication.k8s.io/v1", "plugin"), now=clock, run=plugin)
    monkeypatch.setattr(api, "resolve", lambda connection: Access(HOST, credentials))
    run.go(2 * 3600.0)
    assert len(issued) == 2 and len(run.lists) == 1
    lines = run.log.splitlines()
    assert len(lines) == 2 and "credentials are not accepted" in lines[0] and "can be read again" in lines[1]
