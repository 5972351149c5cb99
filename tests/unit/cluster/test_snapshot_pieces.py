# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Snapshot files in the usual layouts are decoded piece by piece, with the result of decoding them as a whole."""

from __future__ import annotations

import gzip
import json
import os
import random
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import SnapshotError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files import snapshot as module
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.snapshot import (
    canonical_snapshot,
    parse_snapshot,
    read_snapshot,
    snapshot_objects,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from tests.benchmarks.large_cluster import large_cluster, printed

OBJECTS = large_cluster(12, 3)
NAMELESS = {"metadata": {"name": "of the List's kind"}}
NESTED = {"kind": "List", "items": OBJECTS[:2]}
LARGE = {**OBJECTS[0], "spec": {"text": "x" * 3000}}
ITEMS = {
    "objects": OBJECTS,
    "one object": OBJECTS[:1],
    "none": [],
    "an item without a kind": [*OBJECTS, NAMELESS],
    "an item that is no object": [*OBJECTS[:9], 3, *OBJECTS[9:]],
    "a List among the items": [*OBJECTS, NESTED, *OBJECTS],
    "an object larger than a piece": [*OBJECTS, LARGE, *OBJECTS],
    "text that looks like the layout": [{**OBJECTS[0], "spec": {"text": 'a},\n\n        },\n\n]}\n    ]"items": [\n'}}],
}


def one_per_line(items: list[Any]) -> bytes:
    """Return a List in the layout of this project's snapshots."""
    lines = ",\n".join(json.dumps(item, separators=(",", ":")) for item in items)
    return f'{{"apiVersion":"v1","kind":"List","items":[\n{lines}\n]}}\n'.encode()


def typed(items: list[Any]) -> bytes:
    """Return a List of Services, whose kind follows its items."""
    return printed(items).replace('"kind": "List",\n    "metadata"', '"kind": "ServiceList",\n    "metadata"').encode()


LAYOUTS = {
    "one per line": one_per_line,
    "kubectl": lambda items: printed(items).encode(),
    "typed": typed,
    "two documents": lambda items: one_per_line(items) + one_per_line(items),
    "something behind": lambda items: printed(items).encode() + b"x",
}


def outcome(read: Any) -> Any:
    """Return what was read, or the text of the error."""
    try:
        return read()
    except SnapshotError as error:
        return str(error)


@pytest.fixture(params=[97, 1 << 16])
def _piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DECODED_BYTES", request.param)
    monkeypatch.setattr(module, "_MOST_ITEM_BYTES", 2500)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.usefixtures("_piece")
def test_the_result_is_that_of_the_whole(layout: str, items: str, tmp_path: Path) -> None:
    content = LAYOUTS[layout](json.loads(json.dumps(ITEMS[items])))
    path = tmp_path / "snapshot"
    for packed in (content, gzip.compress(content)):
        path.write_bytes(packed)
        assert outcome(lambda: read_snapshot(str(path))) == outcome(
            lambda whole=packed: parse_snapshot(whole, str(path))
        )


@pytest.mark.parametrize("layout", ["one per line", "kubectl"])
@pytest.mark.usefixtures("_piece")
def test_faults_are_those_of_the_whole(layout: str, tmp_path: Path) -> None:
    whole = LAYOUTS[layout](OBJECTS)
    chance = random.Random(7)
    path = tmp_path / "snapshot"
    for number in range(120):
        at = chance.randrange(len(whole))
        content = whole[:at] if number % 2 else whole[:at] + chance.choice([b"\xff", b"}", b",\n", b'"']) + whole[at:]
        if number % 3 == 0:
            content = gzip.compress(content)
            content = content[: chance.randrange(20, len(content) + 1)]
        path.write_bytes(content)
        expected = outcome(lambda given=content: parse_snapshot(given, str(path)))
        assert outcome(lambda: read_snapshot(str(path))) == expected


@pytest.mark.parametrize("layout", ["one per line", "kubectl"])
def test_only_the_parsed_objects_are_in_memory_together(layout: str, tmp_path: Path) -> None:
    objects = large_cluster(1000, 10)
    content = canonical_snapshot(objects)[0] if layout == "one per line" else LAYOUTS[layout](objects)
    path = tmp_path / "snapshot.json.gz"
    path.write_bytes(gzip.compress(content))
    del objects, content
    tracemalloc.start()
    try:
        state = ClusterState.from_objects(snapshot_objects(str(path)))
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(state.services) == 1000
    # The text and the raw objects of the whole file take 9 MB with one object in a line, and 23 MB as kubectl prints.
    assert peak - kept < 1_000_000


@pytest.mark.parametrize("layout", ["one per line", "kubectl", "typed"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_pipe_is_read_once(layout: str, packed: bool, tmp_path: Path) -> None:
    """As with a path such as /dev/stdin, or what a shell puts in place of <(command)."""
    content = LAYOUTS[layout](OBJECTS)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writing = threading.Thread(target=lambda: path.write_bytes(gzip.compress(content) if packed else content))
    writing.start()
    assert read_snapshot(str(path)) == parse_snapshot(content)
    writing.join()


PAGE = {"kind": "ServiceList", "metadata": {"continue": "eyJ2Ijoi", "remainingItemCount": 40}, "items": OBJECTS[:2]}
COUNTED = {**PAGE, "metadata": {"remainingItemCount": 40}}


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(PAGE),
        json.dumps(COUNTED),
        json.dumps([{"kind": "List", "items": []}, PAGE]),
        json.dumps({"kind": "List", "items": [PAGE, *OBJECTS]}),
        json.dumps({"kind": "NodeList", "items": []}) + "\n" + json.dumps(PAGE),
        "kind: List\nmetadata: {continue: eyJ2Ijoi}\nitems: []\n",
        one_per_line([*OBJECTS, PAGE]).decode(),
        one_per_line(OBJECTS).decode().replace("\n]}", '\n],"metadata":{"continue":"eyJ2Ijoi"}}'),
        printed(OBJECTS).replace('"resourceVersion": ""', '"continue": "eyJ2Ijoi"'),
    ],
    ids=["page", "counted", "array", "nested", "documents", "yaml", "among items", "one per line", "kubectl"],
)
def test_one_page_of_a_longer_list_is_refused(tmp_path, content):
    path = tmp_path / "page.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SnapshotError, match=r"page\.json: holds a part of a \w+ only, .*metadata\.continue"):
        read_snapshot(str(path))


def test_whole_lists_with_metadata_are_read(tmp_path):
    path = tmp_path / "whole.json"
    for metadata in ({"continue": ""}, {"resourceVersion": "7"}, {"remainingItemCount": 0}, None, "text"):
        path.write_text(json.dumps({**PAGE, "metadata": metadata}), encoding="utf-8")
        assert len(read_snapshot(str(path))) == 2
