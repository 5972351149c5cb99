# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the cache file of the cluster state."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import SnapshotError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.cache import (
    FORMAT,
    VERSION,
    open_cache,
    read_cache,
    write_cache,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.objects import ObjectKey

OBJECTS = [{"kind": "Service", "metadata": {"name": f"s{number}", "namespace": "d"}} for number in range(50)]
ENCODED = [json.dumps(item).encode() for item in OBJECTS]


KINDS = {"Service", "EndpointSlice"}


def texts(path):
    return list(open_cache(path).texts())


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "state" / "cluster")


def test_a_written_cache_is_read_back(path):
    write_cache(path, ENCODED, KINDS)
    assert read_cache(path) == OBJECTS
    assert os.listdir(os.path.dirname(path)) == ["cluster"]


def test_objects_are_read_as_they_were_written(path):
    for written in (ENCODED, ENCODED[:1], []):
        write_cache(path, written, KINDS)
        assert texts(path) == written
    write_cache(path, [json.dumps({"kind": "Service", "text": "a,\n]}"}).encode()], KINDS)
    assert [json.loads(text)["text"] for text in texts(path)] == ["a,\n]}"]


def test_the_kinds_that_are_known_are_kept_even_without_any_object(path):
    for kinds in (KINDS, {"Service"}, set()):
        write_cache(path, ENCODED, kinds)
        assert open_cache(path).kinds == kinds


def test_an_older_cache_is_replaced(path):
    write_cache(path, ENCODED, KINDS)
    write_cache(path, ENCODED[:1], KINDS)
    assert read_cache(path) == OBJECTS[:1]


def test_an_absent_cache_is_reported(path):
    with pytest.raises(SnapshotError, match=re.escape(path) + ": no cached cluster state: No such file"):
        read_cache(path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-10], "SHA-256"),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "SHA-256"),
        (lambda content: b"", "no valid header"),
        (lambda content: content[20:], "no valid header"),
        (lambda content: content.replace(b'"version": 1', b'"version": 2'), "version 2"),
        (lambda content: b"\x00" * len(content), "no valid header"),
    ],
)
def test_damage_is_refused_in_one_line(path, damage, reason):
    write_cache(path, ENCODED, KINDS)
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(damage(content))
    for read in (read_cache, open_cache):
        with pytest.raises(SnapshotError) as caught:
            read(path)
    assert reason in str(caught.value)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="cannot be written"):
        write_cache(str(tmp_path / "file" / "cluster"), ENCODED, KINDS)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b'{"kind":"List","items":[]}', "not a list of objects"),
        (b'{"apiVersion":"v1","kind":"List","items":[\n{}\n', "not a list of objects"),
        (b"", "not a list of objects"),
        (None, "not valid gzip"),
    ],
)
def test_lines_that_are_no_list_of_objects_are_refused(tmp_path, payload, reason):
    packed = b"no gzip" if payload is None else gzip.compress(payload)
    header = {"format": FORMAT, "version": VERSION, "written": 1.0, "sha256": hashlib.sha256(packed).hexdigest()}
    (tmp_path / "file").write_bytes(json.dumps({**header, "kinds": []}).encode() + b"\n" + packed)
    with pytest.raises(SnapshotError, match=reason):
        texts(str(tmp_path / "file"))


def test_objects_are_selected_by_their_key_and_others_are_not_parsed(path):
    named = {"kind": "Service", "metadata": {"name": "s7", "namespace": "other"}}
    write_cache(path, [*ENCODED, json.dumps(named).encode(), b"{no JSON}"], KINDS)
    key = ObjectKey("Service", "d", "s7")
    assert list(open_cache(path).texts_of({key}.__contains__, {"s7"})) == [ENCODED[7]]
    assert len(list(open_cache(path).texts_of(lambda key: key.kind == "Service", {"Service"}))) == 51
    with pytest.raises(SnapshotError, match="cannot be read"):
        read_cache(path)
