# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive of the pods' images, and the tables of results."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

from tests.e2e.images import ENTRYPOINTS, image_of, write_archive
from tests.e2e.results import details, failures, read_report, summary

NAMES = [
    "registry.example/agnhost:2.63.0",
    "registry.example/agnhost:2.55",
    "registry.example/busybox:1.37",
    "registry.example/distroless-iptables:v0.9.3",
    "registry.example/pause:3.10",
    "registry.example/regression-issue-74839:1.4",
]


def test_images_share_layers_and_have_all_names(tmp_path: Path) -> None:
    layers = {"first.tar": b"packages", "second.tar": b"programs"}
    for name, data in layers.items():
        (tmp_path / name).write_bytes(data)
    write_archive(tmp_path / "images.tar", [tmp_path / name for name in layers], NAMES)
    with tarfile.open(tmp_path / "images.tar") as archive:

        def content(name: str) -> bytes:
            stream = archive.extractfile(name)
            assert stream is not None
            return stream.read()

        manifest = json.loads(content("manifest.json"))
        assert sorted(tag for item in manifest for tag in item["RepoTags"]) == sorted(NAMES)
        assert len(manifest) == len(ENTRYPOINTS)
        for item in manifest:
            assert {name: content(name) for name in item["Layers"]} == layers
            text = content(item["Config"])
            assert item["Config"] == f"{hashlib.sha256(text).hexdigest()}.json"
            digests = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in layers.values()]
            assert json.loads(text)["rootfs"]["diff_ids"] == digests
    assert image_of("pause", NAMES) == "registry.example/pause:3.10"


def spec(name: str, state: str, message: str = "", kind: str = "It") -> dict[str, Any]:
    """Return a spec as ginkgo reports it."""
    return {
        "LeafNodeType": kind,
        "ContainerHierarchyTexts": ["[sig-network] Services"],
        "LeafNodeText": name,
        "State": state,
        "RunTime": 2_600_000_000,
        **({"Failure": {"Message": message}} if message else {}),
    }


def write_report(path: Path, *specs: dict[str, Any]) -> Path:
    path.write_text(json.dumps([{"SpecReports": list(specs)}]), encoding="utf-8")
    return path


def test_results_count_what_was_run(tmp_path: Path) -> None:
    first = read_report(
        write_report(
            tmp_path / "first.json",
            spec("", "passed", kind="SynchronizedBeforeSuite"),
            spec("serves", "passed"),
            spec("hangs", "timedout", "too long\nmore"),
            spec("needs three nodes", "skipped", "Requires at least 3 nodes"),
            spec("is not in the focus", "skipped"),
            spec("is not ready", "pending"),
        )
    )
    second = read_report(write_report(tmp_path / "second.json", spec("serves", "panicked", "no reason")))
    runs = {"nftables": first, "iptables": second}
    assert summary(runs)[2:] == ["| nftables | 1 | 1 | 1 |", "| iptables | 0 | 1 | 0 |"]
    assert failures(runs) == [
        "nftables: [sig-network] Services hangs: too long",
        "iptables: [sig-network] Services serves: no reason",
    ]
    assert details(runs) == [
        "| spec | nftables | iptables |",
        "|---|---|---|",
        "| [sig-network] Services hangs | failed 3 s | - |",
        "| [sig-network] Services needs three nodes | skipped 3 s | - |",
        "| [sig-network] Services serves | passed 3 s | failed 3 s |",
    ]
