# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A disk that is read-only, full or broken under the files that a running agent writes: it follows the cluster."""

from __future__ import annotations

import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

import pytest

from tests.kernel.agent_node import cluster_ip
from tests.kernel.file_fault_node import FilesNode, named
from tests.lab.faulty_disk import CALLS, NO_FILES, READ_ONLY, REASONS
from tests.waiting import wait_for

#: Attempts to write a file during a fault.
ATTEMPTS = 3
STATE, SOCKET, TOKEN, LOCK, XTABLES = "cache.gz", "agent.sock", "token", "run/lock", "xtables.lock"


class Row(NamedTuple):
    """A file that the agent writes while it runs.

    ``kinds``: the faults that concern it. ``prepare`` is called before the fault, and ``write`` during it makes the
    agent write. ``line``: what the agent says. ``recovers``: whether the file is written again.
    """

    kinds: Sequence[str]
    line: str
    write: Callable[[FilesNode, str], None]
    recovers: Callable[[FilesNode], object]
    prepare: Callable[[FilesNode], None] = lambda _node: None


def ask_for_no_token(node: FilesNode) -> None:
    """Let the token be one that cannot be renewed yet."""
    node.renew_tokens(False)
    node.write_stale_token()
    wait_for(lambda: "the token for the API server cannot be renewed" in node.log, 60.0)


ROWS = {
    STATE: Row(
        kinds=[*REASONS],
        line="the cluster state cannot be saved",
        write=lambda node, _kind: [node.serve(number) for number in range(2, 5)],
        recovers=lambda node: "the cluster state is saved again" in node.log,
    ),
    SOCKET: Row(
        # A socket needs no data, and is neither synced nor renamed.
        kinds=[READ_ONLY, NO_FILES],
        line="the control socket cannot be created",
        write=lambda node, kind: node.lose(SOCKET, kind),
        recovers=FilesNode.status,
    ),
    TOKEN: Row(
        kinds=[*REASONS],
        line="the token for the API server cannot be renewed",
        prepare=ask_for_no_token,
        write=lambda node, _kind: node.renew_tokens(True),
        recovers=lambda node: node.lines("the token for the API server was renewed")[1:],
    ),
}
#: Files that the agent opens at its start, or that its programs open; each has a test of its own.
OTHERS = {LOCK, XTABLES}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FilesNode]:
    """Provide an agent with file systems of its own and one Service."""
    agent_node = FilesNode(made(tmp_path))
    agent_node.start()
    yield agent_node
    agent_node.close()


def made(tmp_path: Path) -> Path:
    """Return a directory that can be mounted over."""
    directory = tmp_path / "node"
    directory.mkdir()
    return directory


def is_legacy() -> bool:
    """Return whether the kernel has the tables of iptables-legacy."""
    return subprocess.run(["iptables-legacy-save"], capture_output=True, check=False).returncode == 0


def complaints(node: FilesNode, row: Row, kind: str) -> list[str]:
    """Return the lines about a file that give the reason of the fault."""
    return [line for line in node.lines(row.line) if REASONS[kind] in line]


@pytest.mark.parametrize("variant", ["", pytest.param("legacy", marks=pytest.mark.full)])
def test_each_file_that_the_agent_writes_has_a_test(tmp_path: Path, variant: str) -> None:
    node = FilesNode(made(tmp_path), "iptables" if variant else "nftables", variant)
    trace = node.traced()
    try:
        node.start()
        for row in ROWS.values():
            row.prepare(node)
            row.write(node, READ_ONLY)
        wait_for(lambda: node.status() and "cache.gz" in node.written(), 60.0)
        wait_for(lambda: ROWS[TOKEN].recovers(node), 60.0)
        assert node.stop() == 0
    finally:
        node.close()
    _read, written = named(trace, node.scratch)
    assert written == {*ROWS, LOCK, *([XTABLES] if variant else [])}


@pytest.mark.parametrize(
    "kind", [kind if kind == NO_FILES else pytest.param(kind, marks=pytest.mark.full) for kind in REASONS]
)
def test_services_are_programmed_and_each_file_is_written_once_the_fault_ends(node: FilesNode, kind: str) -> None:
    rows = {name: row for name, row in ROWS.items() if kind in row.kinds}
    wait_for(lambda: STATE in node.written(), 60.0)
    for row in rows.values():
        row.prepare(node)
    with node.fault(kind):
        for row in rows.values():
            row.write(node, kind)
        for name, row in rows.items():
            wait_for(partial(complaints, node, row, kind), 60.0, what=name)
        if kind in CALLS:
            calls = Path(f"{node.scratch}.calls")
            wait_for(lambda: calls.read_text().count("(INJECTED)") >= ATTEMPTS * len(rows), 60.0)
        kept = node.written()[STATE]
        for name, row in rows.items():
            said = complaints(node, row, kind)
            assert len(said) == 1 and str(node.scratch / name) in said[0], node.log
        assert node.fetch("/healthz", node.health_port)
    for name, row in rows.items():
        wait_for(partial(row.recovers, node), 60.0, what=name)
    assert node.written()[STATE] != kept
    assert node.status()["syncs"] > 0 and "Traceback" not in node.log
    assert [name for name in node.written() if name.startswith(".")] == []
    assert node.stop() == 0


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.full) for kind in REASONS])
def test_an_agent_killed_during_the_fault_starts_from_the_last_state_that_was_saved(node: FilesNode, kind: str) -> None:
    wait_for(lambda: STATE in node.written(), 60.0)
    with node.fault(kind):
        node.serve(2)
        wait_for(lambda: REASONS[kind] in node.log, 60.0)
        node.stop(signal.SIGKILL)
    node.stop_api()
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    node.start(wait=False)
    wait_for(lambda: cluster_ip(1) in node.kernel_text(""), 60.0)
    assert "Traceback" not in node.log


def test_an_agent_that_starts_on_a_full_disk_serves_and_answers_commands_later(node: FilesNode) -> None:
    node.stop(signal.SIGKILL)
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    (node.scratch / SOCKET).unlink()
    node.prefix = [*node.prefix, *node.faulty(NO_FILES)]
    node.start(wait=False)
    wait_for(lambda: cluster_ip(1) in node.kernel_text(""), 60.0)
    (said,) = node.lines("the control socket cannot be created")
    assert REASONS[NO_FILES] in said and str(node.scratch / SOCKET) in said
    node.inside(f"umount -l {node.scratch}")
    wait_for(node.status, 60.0)
    assert "Traceback" not in node.log and node.stop() == 0


@pytest.mark.full
def test_without_its_lock_no_agent_starts_and_the_next_one_takes_over_what_is_served(node: FilesNode) -> None:
    node.stop(signal.SIGKILL)
    before, node.prefix = node.prefix, [*node.prefix, *node.faulty(READ_ONLY)]
    node.start(wait=False)
    assert node.process is not None and node.process.wait(60) == 1
    (said,) = node.lines("the agent cannot run")
    assert f"{node.scratch / LOCK}: cannot be opened: {REASONS[READ_ONLY]}" in said
    assert cluster_ip(1) in node.kernel_text("")
    node.prefix = before
    node.start()


@pytest.mark.skipif(not is_legacy(), reason="the kernel has no tables of iptables-legacy")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.full) for kind in (READ_ONLY, NO_FILES)])
def test_rules_are_written_once_their_lock_can_be_created(tmp_path: Path, kind: str) -> None:
    node = FilesNode(made(tmp_path), "iptables", "legacy")
    try:
        node.start()
        with node.fault(kind):
            node.lose(XTABLES, kind)
            node.put_service(2)
            wait_for(lambda: node.lines(XTABLES), 60.0)
            (said,) = node.lines(XTABLES)
            assert REASONS[kind] in said, said
            assert XTABLES in node.status()["lastError"]
            assert cluster_ip(1) in node.kernel_text("legacy")
        wait_for(lambda: cluster_ip(2) in node.kernel_text("legacy"), 60.0)
        wait_for(lambda: not node.status()["lastError"], 60.0)
        assert "Traceback" not in node.log and node.stop() == 0
    finally:
        node.close()
