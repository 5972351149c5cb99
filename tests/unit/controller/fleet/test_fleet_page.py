# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page of the fleet report as text: escaping, structure, content security policy. tests/fleet uses a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from html.parser import HTMLParser

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.document import (
    About,
    document,
    make_report,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.kinds import KINDS, STATES
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.nodes import read_nodes
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.page import page, script_data
from tests.fleet import samples

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "\"><svg onload='alert(1)'>",
    "<!-- <script>",
    "a&lt;b&#60;c",
    "'onmouseover='alert(1)",
    "\u2028alert(1)\u202e",
)
VOID = {"meta", "input", "rect", "br"}


class Outline(HTMLParser):
    """The elements of a page with their attributes, its texts, and whether elements are closed in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.wrong, self.texts = [], [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            if tag not in VOID:
                self.wrong.append(tag)
            return
        self.open.pop()

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def made():
    return page(samples.report(samples.fleet(300)))


@pytest.fixture(scope="module")
def outline(made):
    return Outline(made)


def hostile_report():
    """Return a report in which every text is hostile."""
    entries = []
    for number, words in enumerate(HOSTILE):
        result = samples.healthy(random.Random(number), words)
        for key in ("mode", "mode_reason", "variant", "summary", "agent_version", "kernel", "distribution"):
            result[key] = words
        result.update(drift=True, cautions=[words], families=[words], programmed={words: 1})
        result["changes"] = [{"table": words, "added": 1, "replaced": 0, "removed": 0}]
        result["refused"] = [dict.fromkeys(("kind", "namespace", "name", "field", "reason"), words)]
        result["agent"].update(mode=words, error=words, healthy=False, version=words, api_server={words: words})
        entries.append({"name": f"{words} {number}", "results": [result]})
        entries.append({"name": f"{words} gone", "results": [{"unreachable": True, "msg": words}]})
        entries.append({"name": f"{words} bad", "results": [{"failed": True, "msg": words, "error_kind": words}]})
    about = About(0.0, title=HOSTILE[0], collection_version=HOSTILE[1], engine=HOSTILE[2])
    return make_report(read_nodes(entries), about)


def test_hostile_texts_make_no_element_and_no_attribute():
    outline = Outline(page(hostile_report()))
    assert (outline.wrong, outline.open) == ([], [])
    assert {"img", "iframe", "link", "object"}.isdisjoint(tag for tag, _attributes in outline.elements)
    assert [attributes.get("type", "") for attributes in outline.all("script")] == ["application/json", ""]
    assert [key for _tag, attributes in outline.elements for key in attributes if key.startswith("on")] == []
    assert {attributes.get("class") for attributes in outline.all("svg")} == {"share", "tally"}


def test_hostile_texts_arrive_as_they_are():
    outline = Outline(page(hostile_report()))
    data = json.loads(outline.texts["script"][0])
    assert {node["kernel"] for node in data["nodes"]} >= set(HOSTILE[:-1])
    assert any(HOSTILE[0] in text for text in outline.texts["td"])


@pytest.mark.parametrize("words", HOSTILE)
def test_data_in_the_page_cannot_end_its_element(words):
    text = script_data({words: [words]})
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text) == {words: [words]}


def test_the_page_is_well_formed_and_unambiguous(outline):
    assert (outline.wrong, outline.open) == ([], [])
    identities = [attributes["id"] for _tag, attributes in outline.elements if "id" in attributes]
    assert len(identities) == len(set(identities))
    targets = {attributes["href"][1:] for attributes in outline.all("a")}
    assert targets <= set(identities)
    assert outline.all("html") == [{"lang": "en"}]


def test_the_page_loads_nothing_and_runs_nothing_else(made, outline):
    for _tag, attributes in outline.elements:
        assert {"src", "style", "srcset", "action"}.isdisjoint(attributes)
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"https?:|@import|url\(", made)
    policy = next(
        item["content"] for item in outline.all("meta") if item.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none';")
    for tag in ("style", "script"):
        content = re.findall(rf"<{tag}>(.*?)</{tag}>", made, re.DOTALL)
        assert len(content) == 1
        digest = base64.b64encode(hashlib.sha256(content[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_the_page_is_accessible_to_screen_readers(outline):
    for attributes in outline.all("th"):
        assert attributes.get("scope") in ("row", "col")
    assert len(outline.all("caption")) == 1
    for attributes in outline.all("a"):
        if "cell" in (attributes.get("class") or ""):
            name, _colon, state = attributes["aria-label"].partition(": ")
            assert name and state
    for attributes in outline.all("section"):
        assert attributes.get("aria-labelledby") or attributes.get("aria-label")
    labels = len(outline.all("label"))
    assert labels == len(outline.all("input")) + len(outline.all("select"))


def test_every_node_has_a_cell_and_a_row(outline):
    cells = [item for item in outline.all("a") if "cell" in (item.get("class") or "")]
    rows = [item for item in outline.all("tr") if re.fullmatch(r"n\d+", item.get("id", ""))]
    assert len(cells) == len(rows) == 300


def reach_page(numbers, failing):
    """Return the page of nodes that have probed two Services, of which these nodes do not reach the second."""
    entries = []
    for number in numbers:
        result = samples.healthy(random.Random(number), f"n{number}")
        bad = {"service": "<b>/web", "reached": number not in failing, "reason": "refused" if number in failing else ""}
        result["traffic"] = [{"service": "default/kubernetes", "reached": True, "reason": ""}, bad]
        entries.append({"name": f"n{number}", "results": [result]})
    return page(make_report(read_nodes(entries), About(0.0)))


def test_the_page_shows_node_by_service_what_is_reached(made):
    assert "Which node reaches" not in made
    text = reach_page(range(3), {1})
    matrix = text.partition("Which node reaches which Service")[2].partition("</section>")[0]
    assert "2 of 3 nodes reach all of these Services." in matrix and "&lt;b&gt;/web" in matrix and "<b>" not in matrix
    rows = dict(re.findall(r'<tr><th scope="row"><a [^>]*>(\w+)</a></th>(.*?)</tr>', matrix))
    assert {name: row.count(">reached<") for name, row in rows.items()} == {"n0": 2, "n1": 1, "n2": 2}
    assert 'title="refused"' in rows["n1"] and ">not reached<" in rows["n1"]
    many = reach_page(range(100), {1, 70}).partition("Which node reaches which Service")[2].partition("</section>")[0]
    assert "98 of 100 nodes reach all of these Services; 98 are not shown." in many
    assert re.findall(r'data-node="\d+">(n\d+)<', many) == ["n1", "n70"]


def test_states_can_be_distinguished_without_colours():
    letters = [KINDS[state].letter for state in STATES]
    assert len(set(letters)) == len(letters)


def test_the_same_report_gives_the_same_page(made):
    assert page(samples.report(samples.fleet(300))) == made


def test_a_report_of_no_node_and_one_without_exceptions():
    assert "There are no nodes" in page(make_report((), About(0.0)))
    good = samples.healthy(random.Random(2), "a")
    good.update(refused=[], refused_count=0)
    text = page(make_report(read_nodes([{"name": "a", "results": [good]}]), About(0.0)))
    assert "The node is fine." in text and "None: every node is as it should be" in text


def test_many_nodes_begin_with_the_matrix_and_few_with_the_exceptions():
    for number, first in ((59, "exceptions"), (60, "nodes")):
        sections = [item["id"] for item in Outline(page(samples.report(samples.fleet(number)))).all("section")[1:]]
        assert sections[0] == first and sections[-1] == "table", number


def test_reasons_that_differ_in_numbers_are_one_line():
    entries = [
        {"name": name, "results": [{"unreachable": True, "msg": f"host {address}: No route to host"}]}
        for name, address in (("a", "10.0.0.7"), ("b", "10.0.0.8"), ("c", "10.11.0.9"))
    ]
    entries.append({"name": "d", "results": [{"unreachable": True, "msg": "Permission denied"}]})
    text = page(make_report(read_nodes(entries), About(0.0)))
    section = text[text.index('id="kind-unreachable"') :].partition("</table>")[0]
    assert section.count("<tr>") == 3 and "and 2 similar" in section and "10.11.0.9" in section


def test_the_page_shows_what_has_changed_since_the_earlier_report():
    entries = samples.fleet(100)
    assert 'id="changes"' not in page(samples.report(entries))
    same = document(samples.report(entries))
    assert "None: each node has the same state" in page(samples.report(entries, same))
    before = {**same, "nodes": [dict(node) for node in same["nodes"][1:]]}
    before["nodes"][0]["state"] = "drifted"
    before["nodes"].append({"name": "old-1", "state": "ok", "mode": "ipvs", "engine": "", "agent": None})
    before["summary"] = {**same["summary"], "services": same["summary"]["services"] - 3}
    text = page(samples.report(entries, before))
    section = text[text.index('id="changes"') :].partition("</section>")[0]
    outline = Outline(text)
    assert (outline.wrong, outline.open) == ([], [])
    assert "not in the report" in section and "Drifted" in section and "old-1" in section
    assert "(+3)" in text and "worker-0001" in section and "worker-0003" not in section


@pytest.mark.parametrize("words", HOSTILE)
def test_an_earlier_document_may_hold_anything(words):
    node = dict.fromkeys(("name", "state", "mode", "engine"), words)
    before = {"generated": words, "nodes": [node, words, {"name": 3}, {"name": "worker-0001", "agent": words}]}
    text = page(samples.report(samples.fleet(3), {**before, "summary": {"nodes": words}}))
    outline = Outline(text)
    assert (outline.wrong, outline.open) == ([], [])
    assert {"img", "iframe"}.isdisjoint(tag for tag, _attributes in outline.elements)
    assert page(samples.report(samples.fleet(3), {"nodes": words, "summary": None}))
