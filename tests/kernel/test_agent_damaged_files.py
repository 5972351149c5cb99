# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files that an agent finds damaged or unreadable at its start: one line names each, and Services are served."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Iterator

import pytest

from tests.kernel.agent_node import cluster_ip
from tests.kernel.file_fault_node import FilesNode, named
from tests.lab import manifests
from tests.lab.faulty_disk import tracer
from tests.waiting import wait_for

STATIC_IP = "10.96.9.9"
#: Files that the agent reads at its start, and what it says about a damaged one. The lock has only the name of its
#: holder, and is written again.
SAID = {
    "cache.gz": "no cluster state to start from",
    "drain.json": "the drain file is ignored",
    "token": "the token for the API server cannot be renewed",
    "services.d/static.json": "a manifest of a static Service cannot be used",
    "kubeconfig": "kubeconfig",
    "run/lock": "lock",
}
#: Without its configuration, no agent can run.
NEEDED = {"config.yaml": "the configuration"}
DAMAGES = {
    "emptied": lambda _content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "overwritten": lambda content: b"\xff\x00" * (len(content) // 2 + 1),
}
UNREADABLE = "unreadable"
OTHER_DAMAGES = ("emptied", "overwritten", UNREADABLE)
SILENT = "run/lock"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FilesNode]:
    """Provide an agent that has run: each of its files has its usual content."""
    scratch = tmp_path / "node"
    scratch.mkdir()
    made = FilesNode(scratch)
    made.services.mkdir()
    (made.services / "static.json").write_text(json.dumps(manifests.service("static", STATIC_IP, [manifests.port(80)])))
    now = time.time()
    (scratch / "drain.json").write_text(json.dumps({"since": now, "until": now + 3600}))
    made.start()
    wait_for(lambda: "cache.gz" in made.written(), 60.0)
    assert made.stop() == 0
    yield made
    made.close()


@pytest.mark.full
def test_each_file_that_the_agent_reads_has_a_test(node: FilesNode) -> None:
    trace = node.traced()
    node.start()
    assert node.stop() == 0
    read, written = named(trace, node.scratch)
    certificates = {name for name in read if name.startswith("tls/")}
    assert (read | written) - certificates - {"agent.sock"} == {*SAID, *NEEDED}


@pytest.mark.parametrize("damage", ["cut", *(pytest.param(name, marks=pytest.mark.full) for name in OTHER_DAMAGES)])
def test_an_agent_names_each_damaged_file_once_and_serves_when_they_are_intact(node: FilesNode, damage: str) -> None:
    intact = {name: (node.scratch / name).read_bytes() for name in SAID}
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    if damage == UNREADABLE:
        paths = [word for name in SAID for word in ("-P", str(node.scratch / name))]
        node.prefix = [
            *node.prefix,
            *tracer("read,pread64", f"{node.scratch}.calls", ["-D", "-I1", *paths], ":error=EIO"),
        ]
    else:
        for name, content in intact.items():
            (node.scratch / name).write_bytes(DAMAGES[damage](content))
    node.start(wait=False)
    for name, text in SAID.items():
        if name != SILENT:
            wait_for(partial(complaints, node, name), 120.0, what=f"{name}: {text}")
    assert node.status()["healthy"]
    if damage == UNREADABLE:
        assert node.process is not None
        found = re.search(r"TracerPid:\t(\d+)", Path(f"/proc/{node.process.pid}/status").read_text())
        assert found is not None
        os.kill(int(found[1]), signal.SIGTERM)
    for name, content in intact.items():
        (node.scratch / name).write_bytes(content)
    node.write_stale_token()
    for address in (STATIC_IP, cluster_ip(1)):
        wait_for(lambda: address in node.kernel_text(""), 60.0, what=address)  # noqa: B023
    wait_for(lambda: "the token for the API server was renewed" in node.log, 60.0)
    assert [len(complaints(node, name)) for name in SAID] == [int(name != SILENT) for name in SAID], node.log
    assert "Traceback" not in node.log and node.stop() == 0


def complaints(node: FilesNode, name: str) -> list[str]:
    """Return the lines about a damaged file, with its path."""
    return [line for line in node.lines(SAID[name]) if str(node.scratch / name) in line]
