# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a reflector reads from a misbehaving API server: a bounded amount, and every object that is valid."""

from __future__ import annotations

import gzip
import json

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api import client as api
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from tests.apiserver.wire import head, response, silent
from tests.unit.agent.scripted_reflector import Run, event, events, page, service


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


def test_a_defect_in_reading_one_object_costs_only_this_object():
    def reduce(item):
        if item["metadata"]["name"] == "bad":
            raise ZeroDivisionError("a defect")
        return prune(item)

    run = Run(lambda query: page([service("a"), service("bad"), service("c")]), lambda query: events())
    run.reflector._reduce = reduce
    run.go(60.0)
    assert run.names == ["a", "c"]
    assert "Service default/bad: ZeroDivisionError" in run.log
