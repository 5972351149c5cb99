# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Large tables of iptables-nft: filled and refilled in portions, while progress is reported to the service manager.

Every call of the restore program is recorded by a wrapper script.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.portions import PORTION
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.restore import RollbackRequest, rollback
from tests.benchmarks.large_cluster import large_cluster
from tests.kernel.agent_node import NODE, AgentNode, node_object
from tests.waiting import wait_for

ENDPOINTS = 5
WATCHDOG_SECONDS = 60
SIZES = [600, pytest.param(10000, marks=pytest.mark.full)]

RECORDER = """#!/bin/sh
text=$(mktemp {folder}/restore.XXXXXX)
cat > "$text"
exec {program} "$@" < "$text"
"""


class Restores:
    """The input of iptables-restore: for each call, the number of chains that each of its transactions creates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for family in ("iptables", "ip6tables"):
            recorder = folder / f"{family}-nft-restore"
            recorder.write_text(RECORDER.format(folder=folder, program=f"/usr/sbin/{family}-nft-restore"))
            recorder.chmod(0o755)

    def clear(self) -> None:
        for path in self.folder.glob("restore.*"):
            path.unlink()

    def chains(self) -> list[list[int]]:
        paths = sorted(self.folder.glob("restore.*"), key=lambda path: path.stat().st_mtime_ns)
        return [[part.count("\n:") for part in path.read_text().split("COMMIT\n") if part.strip()] for path in paths]


class Manager:
    """The service manager's end of the notification socket; records when each message arrived."""

    def __init__(self, path: Path) -> None:
        self.messages: list[tuple[float, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            text = self._socket.recv(65536).decode()
            self.messages.append((time.monotonic(), text))

    def longest_silence(self, since: float, until: float) -> float:
        """Return the longest time between two notifications, in seconds."""
        signs = [when for when, text in self.messages if "WATCHDOG=1" in text and since < when < until]
        times = [since, *signs, until]
        return max(later - earlier for earlier, later in zip(times, times[1:]))


@pytest.fixture
def restores(tmp_path: Path) -> Restores:
    return Restores(tmp_path / "recorded")


def programmed() -> int:
    return subprocess.run(["iptables-nft-save", "-t", "nat"], check=True, capture_output=True).stdout.count(b"\n-A ")


def assert_in_portions(restores: Restores, endpoints: int) -> None:
    """Check that no call exceeds one portion, and that all calls together name at least one chain for each endpoint."""
    counts = [count for call in restores.chains() for count in call]
    assert max(counts) <= PORTION
    assert sum(counts) > endpoints


@pytest.mark.parametrize("services", SIZES)
def test_agent_refills_flushed_table_in_portions_and_stays_alive(
    services: int, tmp_path: Path, restores: Restores
) -> None:
    node = AgentNode(tmp_path, "iptables", "nft")
    node.environment["PATH"] = f"{restores.folder}:{node.environment['PATH']}"
    manager = Manager(tmp_path / "notify")
    node.environment.update(NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC=str(WATCHDOG_SECONDS * 1000000))
    for item in large_cluster(services, ENDPOINTS):
        if item["kind"] != "Node":
            node.store.put(item)
    try:
        started = time.monotonic()
        node.start()
        filled = time.monotonic()
        assert_in_portions(restores, services * ENDPOINTS)
        rules = programmed()
        restores.clear()
        flushed = time.monotonic()
        subprocess.run(["iptables-nft", "-t", "nat", "-F"], check=True)
        wait_for(lambda: node.status().get("driftRepaired", 0) > services, 600.0, 0.1)
        repaired = time.monotonic()
        wait_for(lambda: programmed() == rules, 60.0, 1.0)
        assert_in_portions(restores, services * ENDPOINTS)
        silences = [manager.longest_silence(started, filled), manager.longest_silence(flushed, repaired)]
        sys.stdout.write(
            f"{services} Services: filled in {filled - started:.1f} s, refilled in {repaired - flushed:.1f} s, "
            f"longest silence {silences[0]:.1f} s and {silences[1]:.1f} s, load {os.getloadavg()[0]:.1f}\n"
        )
        # Waits for a program report every second; the rest is computation between two of them.
        assert silences[1] < WATCHDOG_SECONDS / 2
        assert node.process is not None and node.process.poll() is None
    finally:
        node.close()


def large_request(services: int, scratch: Path) -> Request:
    objects = [item for item in large_cluster(services, ENDPOINTS) if item["kind"] != "Node"]
    conntrack = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
    return Request(
        cluster=ClusterState.from_objects([*objects, node_object()]),
        configuration=load({"clusterCIDR": "10.128.0.0/9", "mode": "iptables", "conntrack": conntrack}).configuration,
        node_name=NODE,
        state_directory=str(scratch / "state"),
    )


@pytest.mark.parametrize("services", SIZES)
def test_convergence_refills_flushed_table_in_portions(
    services: int, tmp_path: Path, restores: Restores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{restores.folder}:{os.environ['PATH']}")
    request = large_request(services, tmp_path)
    converge(request)
    assert_in_portions(restores, services * ENDPOINTS)
    rules = programmed()
    restores.clear()
    subprocess.run(["iptables-nft", "-t", "nat", "-F"], check=True)
    report = converge(request)
    assert report.changed
    assert_in_portions(restores, services * ENDPOINTS)
    assert programmed() == rules
    restores.clear()
    assert not converge(request).changed and not restores.chains()


@pytest.mark.parametrize("services", SIZES)
def test_rollback_removes_and_restores_large_tables_in_portions(
    services: int, tmp_path: Path, restores: Restores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{restores.folder}:{os.environ['PATH']}")
    request = large_request(services, tmp_path)._replace(history_directory=str(tmp_path / "history"))
    state = converge(request).saved_state
    rules, expected = programmed(), 0
    for _way in ("back", "forward"):
        restores.clear()
        begun = time.monotonic()
        report = rollback(RollbackRequest(state, request.history_directory, state_directory=request.state_directory))
        sys.stdout.write(f"{services} Services: rolled back in {time.monotonic() - begun:.1f} s: {report.durations}\n")
        assert_in_portions(restores, services * ENDPOINTS)
        assert programmed() == expected
        # The second rollback undoes the first.
        state, expected = report.saved, rules
