# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page of the fleet report in a real browser, from a file, with 1,000 nodes."""

from __future__ import annotations

import json
import re

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.drift import differences
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.kinds import STATES
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.page import page
from tests.fleet import samples
from tests.unit.controller.fleet.test_fleet_page import HOSTILE, hostile_report

NODES = 1000
VISIBLE = "[...document.querySelectorAll('{}')].filter(item => item.offsetParent !== null).length"
CELLS, ROWS = VISIBLE.format("#matrix .cell"), VISIBLE.format("#rows tr")
FOCUS = "document.activeElement.dataset.node"
# Contrast of text against its background as defined by WCAG 2.
CONTRAST = """
(() => {
  const parts = colour => colour.match(/[0-9.]+/g).slice(0, 3).map(Number).map(value => value / 255)
    .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = colour => { const [r, g, b] = parts(colour); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const found = {};
  for (const element of document.querySelectorAll(SELECTOR)) {
    const style = getComputedStyle(element);
    let behind = element;
    while (getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') { behind = behind.parentElement; }
    const both = [light(style.color), light(getComputedStyle(behind).backgroundColor)].sort((a, b) => b - a);
    found[element.className + ' ' + element.tagName] = (both[0] + 0.05) / (both[1] + 0.05);
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def report():
    return samples.report(samples.fleet(NODES))


@pytest.fixture(scope="module")
def path(report, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "fleet-report.html"
    file.write_text(page(report), encoding="utf-8")
    return file


@pytest.fixture
def opened(browser, path):
    """Provide the page, freshly loaded; afterwards the browser must not have reported any error."""
    browser.emulate()
    browser.resize(1440, 1000)
    browser.open(path)
    yield browser
    assert browser.complaints == []


def choose(browser, name, value):
    browser.run(
        f"(() => {{ const box = document.getElementById({json.dumps(name)}); box.value = {json.dumps(value)};"
        " box.dispatchEvent(new Event('change')); })()"
    )


def test_it_loads_from_a_file_and_requests_nothing_else(opened, path):
    assert opened.run("document.documentElement.classList.contains('js')") is True
    assert opened.run(CELLS) == opened.run(ROWS) == NODES
    assert opened.requests == [path.as_uri()]


def test_the_filter_shows_only_matching_nodes(opened, report):
    opened.run("document.getElementById('filter').focus()")
    opened.write("drifted missing")
    expected = sum(any(reason.kind == "drifted" for reason in reasons) for reasons in report.reasons)
    assert 0 < expected < 50
    assert opened.run(CELLS) == opened.run(ROWS) == expected
    assert opened.run("document.getElementById('shown').textContent") == f"{expected} of 1,000 nodes"
    opened.write(" no such words")
    assert (opened.run(CELLS), opened.run("document.getElementById('nothing').hidden")) == (0, False)
    opened.run(
        "(() => { const box = document.getElementById('filter'); box.value = '';"
        " box.dispatchEvent(new Event('input')); })()"
    )
    assert opened.run(CELLS) == NODES


def test_the_legend_filters_by_its_state(opened, report):
    opened.run("document.querySelector('#legend button').click()")
    first = next(state for state in STATES if state in report.states)
    assert opened.run(ROWS) == report.states.count(first)
    choose(opened, "colour", "mode")
    assert opened.run(ROWS) == NODES
    legend = opened.run("[...document.querySelectorAll('#legend button')].map(chip => chip.textContent)")
    assert re.fullmatch(r"anftables\d{3}", legend[0]) and len(legend) >= 3
    assert opened.run("document.querySelectorAll('#matrix .k0').length") == int(legend[0][-3:])


def test_cells_and_rows_are_ordered_together(opened, report):
    opened.run("document.querySelector('th[data-key=drift] button').click()")
    assert opened.run("document.querySelector('th[data-key=drift]').getAttribute('aria-sort')") == "descending"
    assert opened.run("document.querySelectorAll('[aria-sort]').length") == 1
    drifts = {node.name: node.drift_entries for node in report.nodes}
    most = max(drifts.values())
    name = opened.run("document.querySelector('#rows tr th').textContent")
    assert drifts[name] == most
    assert opened.run("document.querySelector('#matrix .cell').getAttribute('aria-label')").startswith(f"{name}: ")
    assert opened.run("document.getElementById('order').value") == "drift"
    choose(opened, "order", "name")
    assert opened.run("document.querySelector('#rows tr th').textContent") == "worker-0001"
    opened.run("document.querySelector('th[data-key=name] button').click()")
    assert opened.run("document.querySelector('#rows tr th').textContent") == f"worker-{NODES}"


def test_a_click_shows_the_details_of_a_node(opened, report):
    place = report.states.index("drifted")
    opened.run(f"document.querySelector('#matrix [data-node=\"{place}\"]').click()")
    node = report.nodes[place]
    text = opened.run("document.getElementById('panel').innerText")
    drift = [f"{item.table}: {item.words}" for change in node.changes for item in differences(change)]
    assert drift
    for words in (node.name, node.kernel, node.distribution, *drift):
        assert words in text
    assert opened.run("document.querySelectorAll('[aria-current]').length") == 1
    opened.run("document.querySelector('#kind-unreachable [data-node]').click()")
    assert "No route to host" in opened.run("document.getElementById('panel').innerText")
    assert opened.run(FOCUS) == str(report.states.index("unreachable"))


def test_the_matrix_is_one_tab_stop_with_arrow_keys_inside(opened):
    assert opened.run("document.querySelectorAll('#matrix .cell[tabindex=\"0\"]').length") == 1
    opened.run("document.querySelector('#matrix .cell').focus()")
    width = opened.run(
        "(() => { const items = [...document.querySelectorAll('#matrix > li')];"
        " return items.findIndex(item => item.offsetTop !== items[0].offsetTop); })()"
    )
    assert width > 10
    for key, place in (
        ("ArrowRight", 1),
        ("ArrowDown", 1 + width),
        ("ArrowLeft", width),
        ("ArrowUp", 0),
        ("ArrowUp", 0),
        ("End", NODES - 1),
        ("Home", 0),
    ):
        opened.press(key)
        assert (key, opened.run(FOCUS)) == (key, str(place))
    assert opened.run("document.getElementById('tip').hidden") is False
    assert "worker-0001" in opened.run("document.getElementById('tip').textContent")
    opened.press("ArrowRight")
    opened.press(" ")
    assert opened.run("document.querySelector('#panel h3').textContent") == "worker-0002"
    opened.press("Escape")
    assert opened.run("document.querySelector('#panel h3')") is None
    opened.press("Enter")
    assert opened.run("document.querySelector('#panel h3').textContent") == "worker-0002"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_readable_in_both_colour_schemes(opened, scheme):
    opened.emulate(scheme=scheme)
    page_colour = opened.run("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", page_colour)[:3]))
    assert brightness > 600 if scheme == "light" else brightness < 150
    texts = "'.badge, .cell, .soft, .meta, th, td, a, dt, .chip, label, .what'"
    found = opened.run(CONTRAST.replace("SELECTOR", texts))
    assert len(found) > 15
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
    for by in ("mode", "kernel"):
        choose(opened, "colour", by)
        found = opened.run(CONTRAST.replace("SELECTOR", "'#matrix .cell'"))
        assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}


def test_nothing_is_cut_off_on_a_small_screen(opened):
    opened.resize(400, 800)
    assert opened.run("document.documentElement.scrollWidth") <= 400


def test_printed_page_has_the_matrix_and_the_table_but_no_controls(opened):
    opened.emulate(media="print")
    assert opened.run(CELLS) == opened.run(ROWS) == NODES
    assert opened.run(VISIBLE.format(".toolbar, .panel")) == 0


def test_everything_is_shown_without_scripts(opened):
    opened.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        opened.call("Page.reload")
        opened._loaded = False
        while not opened._loaded:
            opened._next()
    finally:
        opened.call("Emulation.setScriptExecutionDisabled", value=False)
    assert opened.run("document.documentElement.classList.contains('js')") is False
    assert opened.run(CELLS) == opened.run(ROWS) == NODES
    assert opened.run(VISIBLE.format(".toolbar, .panel")) == 0
    assert opened.run("document.querySelectorAll('#legend .chip').length") > 4


def test_hostile_texts_are_shown_as_text(browser, tmp_path):
    file = tmp_path / "hostile.html"
    report = hostile_report()
    file.write_text(page(report), encoding="utf-8")
    browser.open(file)
    count = browser.run(CELLS)
    assert count == len(report.nodes)
    for place in range(count):
        browser.run(f"document.querySelector('#matrix [data-node=\"{place}\"]').click()")
        assert browser.run("document.querySelector('#panel h3').textContent") == report.nodes[place].name
    for by in ("mode", "engine", "kernel", "distribution"):
        choose(browser, "colour", by)
    assert HOSTILE[0] in browser.run("document.getElementById('legend').textContent")
    assert browser.run("document.querySelectorAll('img, iframe, svg:not(.share):not(.tally)').length") == 0
    assert (browser.complaints, browser.requests) == ([], [file.as_uri()])
