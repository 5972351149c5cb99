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

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.cache import (
    FORMAT,
    VERSION,
    cache_written,
    cached_texts,
    read_cache,
    write_cache,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.errors import SnapshotError

OBJECTS = [{"kind": "Service", "metadata": {"name": f"s{number}", "namespace": "d"}} for number in range(50)]
ENCODED = [json.dumps(item).encode() for item in OBJECTS]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "state" / "cluster")


def test_a_written_cache_is_read_back(path):
    write_cache(path, ENCODED)
    assert read_cache(path).objects == OBJECTS
    assert os.listdir(os.path.dirname(path)) == ["cluster"]


def test_objects_are_read_as_they_were_written(path):
    for texts in (ENCODED, ENCODED[:1], []):
        write_cache(path, texts)
        assert cached_texts(path) == texts
        assert cache_written(path) == read_cache(path).written
    write_cache(path, [json.dumps({"kind": "Service", "text": "a,\n]}"}).encode()])
    assert [json.loads(text)["text"] for text in cached_texts(path)] == ["a,\n]}"]


def test_a_cache_of_an_older_version_is_read(path, tmp_path):
    """Its objects are on one line, which the header does not mention."""
    payload = gzip.compress(json.dumps({"apiVersion": "v1", "kind": "List", "items": OBJECTS}).encode())
    header = {"format": FORMAT, "version": VERSION, "written": 1.0, "sha256": hashlib.sha256(payload).hexdigest()}
    (tmp_path / "older").write_bytes(json.dumps(header).encode() + b"\n" + payload)
    older = str(tmp_path / "older")
    assert [json.loads(text) for text in cached_texts(older)] == read_cache(older).objects == OBJECTS


def test_an_older_cache_is_replaced(path):
    write_cache(path, ENCODED)
    write_cache(path, ENCODED[:1])
    assert read_cache(path).objects == OBJECTS[:1]


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
    write_cache(path, ENCODED)
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(damage(content))
    for read in (read_cache, cached_texts, cache_written):
        with pytest.raises(SnapshotError) as caught:
            read(path)
    assert reason in str(caught.value)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="cannot be written"):
        write_cache(str(tmp_path / "file" / "cluster"), ENCODED)
