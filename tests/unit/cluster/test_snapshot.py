# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Snapshots: every accepted form, faults with their position, and the written form."""

from __future__ import annotations

import gzip
import json
import os
import random

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import SnapshotError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files import snapshot as module
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.snapshot import (
    canonical_snapshot,
    compress,
    parse_snapshot,
    read_snapshot,
    snapshot_digest,
    write_snapshot,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState


def service(name):
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "shop", "managedFields": [{"manager": "x"}], "resourceVersion": "7"},
        "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80, "targetPort": 8080}], "selector": {"app": name}},
        "status": {"loadBalancer": {}},
    }


NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"}, "spec": {}, "status": {"images": [1, 2]}}
OBJECTS = [service("web"), NODE]
LIST = {"apiVersion": "v1", "kind": "List", "items": OBJECTS, "metadata": {"resourceVersion": ""}}
TYPED = [
    {"kind": "ServiceList", "apiVersion": "v1", "items": [{k: v for k, v in OBJECTS[0].items() if k != "kind"}]},
    {"kind": "NodeList", "apiVersion": "v1", "items": [NODE]},
]

FORMS = {
    "what kubectl prints": json.dumps(LIST, indent=4),
    "nested lists": json.dumps({"kind": "List", "items": [{"kind": "List", "items": OBJECTS}]}),
    "typed lists in an array": json.dumps(TYPED),
    "array of objects": json.dumps(OBJECTS),
    "documents one after another": "\n".join(json.dumps(item) for item in TYPED),
    "objects one after another": json.dumps(OBJECTS[0]) + json.dumps(OBJECTS[1]),
    "YAML": yaml.safe_dump(LIST),
    "YAML documents": "---\n" + yaml.safe_dump_all(OBJECTS) + "---\n",
    "YAML in flow style": "{kind: List, items: " + json.dumps(OBJECTS) + "}",
    "with a byte order mark": "\ufeff" + json.dumps(LIST),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_form_gives_the_same_objects(form, packed, tmp_path):
    content = FORMS[form].encode()
    path = tmp_path / "snapshot"
    path.write_bytes(gzip.compress(content) if packed else content)
    objects = read_snapshot(str(path))
    assert [(item["kind"], item["metadata"]["name"]) for item in objects] == [("Service", "web"), ("Node", "node-a")]
    state = ClusterState.from_objects(objects)
    assert not state.refusals and len(state.services) == 1 and len(state.nodes) == 1


def test_empty_lists_are_valid():
    assert parse_snapshot(b'{"kind":"List","items":[]}') == []
    assert parse_snapshot(b'{"kind":"ServiceList","items":null}') == []
    assert parse_snapshot(b"[]") == []


PACKED = compress(FORMS["what kubectl prints"].encode())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        # Without a time: the bytes are part of the test's name, which must be the same in every process.
        (gzip.compress(b"", mtime=0), "is empty"),
        (FORMS["what kubectl prints"].encode()[:200], "the JSON is truncated: .* at line 10 column"),
        (b'{"kind": "List", "items": [}', r"the JSON is not valid: Expecting value at line 1 column 28"),
        (b'{"kind": "List", "items": []} x', r"the JSON is not valid"),
        (b'{"kind": "List", "items": []} {"ki', r"the JSON is truncated"),
        (PACKED[:40], "the gzip data is truncated after 40 bytes"),
        (PACKED[:-8] + bytes(8), "the gzip data is corrupt"),
        (PACKED[:20] + bytes(20) + PACKED[40:], "the gzip data is (corrupt|truncated)"),
        (b"\x1f\x8b\x00", "the gzip data is"),
        (b"\xff\xfe", "not UTF-8 text at byte 0"),
        (b"kind: List\nitems: [\n- x: {", "neither JSON nor valid YAML: .* at line 3"),
        (b"a\tb: : c", "neither JSON nor valid YAML"),
        (b"just some words", "contains plain text"),
        (b"42", "contains a number"),
        (b'{"a": 1}', "contains an object without a kind"),
        (b'{"kind": "List", "items": {}}', "the items of a List are not a list"),
        (b"[" * 100000, "not a snapshot: maximum recursion"),
        (b"[" * 20 + b"]" * 20, "nested more than 8 deep"),
    ],
)
def test_faults_name_the_source_and_the_position(content, reason):
    with pytest.raises(SnapshotError, match=f"^snap: (.*){reason}") as caught:
        parse_snapshot(content, "snap")
    assert str(caught.value).startswith("snap: ") and "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(SnapshotError, match="missing: No such file"):
        read_snapshot(str(tmp_path / "missing"))
    with pytest.raises(SnapshotError, match="Is a directory"):
        read_snapshot(str(tmp_path))


def test_endless_decompression_is_stopped(monkeypatch):
    monkeypatch.setattr(module, "_MAXIMUM_BYTES", 1000)
    with pytest.raises(SnapshotError, match="unpacks to more than 1000 bytes"):
        parse_snapshot(gzip.compress(b" " * 2000))


def test_an_invalid_item_is_passed_on_to_be_refused():
    objects = parse_snapshot(json.dumps({"kind": "List", "items": [3, *OBJECTS, {"metadata": {}}]}).encode())
    state = ClusterState.from_objects(objects)
    assert len(state.refusals) == 2 and len(state.services) == 1


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        *((kind, "v1") for kind in ("Pod", "Namespace", "Node", "Service")),
        ("EndpointSlice", "discovery.k8s.io/v1"),
        ("NetworkPolicy", "networking.k8s.io/v1"),
    ],
)
def test_keys_of_labels_that_are_not_text_in_yaml_do_not_escape(kind, version):
    metadata = "{name: a, namespace: b, labels: {1: x, yes: z, null: 2, app: y}}"
    text = f"kind: {kind}\napiVersion: {version}\nmetadata: {metadata}\n"
    state = ClusterState.from_objects(parse_snapshot(text.encode(), "f"))
    if kind == "Pod":
        assert state.policy.pods["b", "a"].labels == {"app": "y"}
        assert str(state.skipped[0]) == "Pod b/a: metadata.labels: the key 1 is not a string"


def test_the_content_does_not_depend_on_order_or_unread_fields():
    objects = [service(f"web-{number}") for number in range(20)] + [NODE]
    shuffled = json.loads(json.dumps(objects))
    random.Random(5).shuffle(shuffled)
    for item in shuffled:
        item["metadata"]["resourceVersion"] = "other"
    content, counts = canonical_snapshot(objects)
    assert canonical_snapshot(shuffled) == (content, counts)
    assert counts == {"Service": 20, "Node": 1}
    assert b"managedFields" not in content and b"images" not in content and b"selector" not in content
    before, after = ClusterState.from_objects(objects), ClusterState.from_objects(parse_snapshot(content))
    assert before.services == after.services and before.nodes == after.nodes


def test_writing_is_idempotent_and_compressed_by_name(tmp_path):
    path = str(tmp_path / "snapshot.json.gz")
    preview = write_snapshot(path, OBJECTS, check_mode=True)
    assert preview.changed and not os.path.exists(path)
    first = write_snapshot(path, OBJECTS)
    assert first == preview
    with open(path, "rb") as stream:
        content = stream.read()
    assert first.digest == snapshot_digest(gzip.decompress(content))
    assert content[4:8] == bytes(4), "the gzip header carries no time"
    os.chmod(path, 0o640)
    assert not write_snapshot(path, list(reversed(OBJECTS))).changed
    second = write_snapshot(path, OBJECTS[:1])
    assert second.changed and second.digest != first.digest
    assert os.stat(path).st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["snapshot.json.gz"]
    plain = str(tmp_path / "snapshot.json")
    assert write_snapshot(plain, OBJECTS).digest == first.digest
    with open(plain, encoding="ascii") as text:
        assert json.load(text)["kind"] == "List"


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(SnapshotError, match="cannot be written: No such file"):
        write_snapshot(str(tmp_path / "none" / "snapshot"), OBJECTS)
