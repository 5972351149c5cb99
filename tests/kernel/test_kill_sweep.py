# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A convergence that is killed at any point: the next one completes it, and Services that do not change are served.

Half of the kills come before or after the Nth event of the convergence (a netlink send, a program, a file), half at a
point spread over its duration; half of each also kill its child processes. After each kill, the convergence is
repeated and compared with an undisturbed one, and the node is converged back.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.socket import NetlinkSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.kernel.backends import PORT, Backend, endpoint, make_network
from tests.lab import manifests

MODES = (
    pytest.param("iptables", "legacy", id="iptables-legacy"),
    pytest.param("iptables", "nft", id="iptables-nft"),
    # Half a minute of processor time in an emulated node, whose timeouts depend on the speed of everything else.
    pytest.param("ipvs", "legacy", id="ipvs", marks=(pytest.mark.uml, pytest.mark.full)),
)
POINTS = (pytest.param(6, id="some"), pytest.param(120, id="all", marks=pytest.mark.full))
STEADY = 4
PATIENCE = 10.0
FORK = multiprocessing.get_context("fork")
#: Python audit events that change the node.
AUDITED = frozenset(("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "subprocess.Popen"))
VOLATILE = re.compile(r"\[\d+:\d+\]| initval 0x\w+|^\d+: |^#.*| counter packets \d+ bytes \d+", re.MULTILINE)


def steady_address(number: int) -> str:
    return f"10.96.1.{number}"


def objects_of(names: dict[int, list[int]]) -> list[dict[str, Any]]:
    """Return Services by number with the numbers of their backends; those from 100 on use UDP and node ports."""
    found: list[dict[str, Any]] = []
    for number, backends in names.items():
        many = number >= 100
        name, protocol = f"s{number}", "UDP" if many else "TCP"
        port = manifests.port(80, name="main", protocol=protocol, **({"nodePort": 31000 + number} if many else {}))
        address = f"10.96.2.{number}" if many else steady_address(number)
        kind = "NodePort" if many else "ClusterIP"
        found.append(manifests.service(name, address, [port], namespace="shop", type=kind))
        endpoints = [manifests.endpoint(endpoint(backend), "node-1") for backend in backends]
        target = manifests.port(PORT, name="main", protocol=protocol)
        found.append(manifests.endpoint_slice(name, endpoints, [target], name=name, namespace="shop"))
    return found


STEADY_SERVICES = {number: [1, 2, 3] for number in range(1, STEADY + 1)}
BEFORE = {**STEADY_SERVICES, **{number: [1, 2] for number in range(100, 116)}}
AFTER = {
    **STEADY_SERVICES,
    **{number: [2, 3] for number in range(100, 108)},
    **{number: [1, 3] for number in range(120, 132)},
}


class Sweep:
    """One node, two states of its cluster, and convergences between them that may be killed."""

    def __init__(self, mode: str, variant: str, scratch: Path) -> None:
        self.mode = mode
        self.variant = variant
        self.scratch = scratch
        self.history = scratch / "history"

    def converge(self, services: dict[int, list[int]]) -> None:
        conntrack = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
        node = {"kind": "Node", "metadata": {"name": "node-1"}, "status": {"addresses": []}}
        state = ClusterState.from_objects([*objects_of(services), node])
        assert state.refusals == ()
        configuration = load({"mode": self.mode, "clusterCIDR": "10.244.0.0/16", "conntrack": conntrack}).configuration
        converge(
            Request(
                cluster=state,
                configuration=configuration,
                node_name="node-1",
                whole_cluster=False,
                state_directory=str(self.scratch / "state"),
                history_directory=str(self.history),
            )
        )

    def programmed(self) -> list[str]:
        """Return the output of the usual tools, without counters and sorted."""
        commands = [[f"{program}-{self.variant}-save"] for program in ("iptables", "ip6tables")]
        if self.mode == "ipvs":
            commands += [["ipvsadm", "-Sn"], ["ipset", "save"], ["ip", "-o", "address", "show", "dev", "kube-ipvs0"]]
        texts = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for command in commands]
        return sorted(VOLATILE.sub("", line) for text in texts for line in text.splitlines())

    def unfinished(self) -> list[Path]:
        """Return files that a killed writer has begun and not completed."""
        return [path for path in self.scratch.rglob(".*") if path.is_file()]


def _in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a child process that leads its own process group; return its process ID."""
    child = os.fork()
    if child:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            # Whichever comes first.
            os.setpgid(child, child)
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        work()
        status = 0
    finally:
        os._exit(status)


def _count_events(at: Callable[[], None]) -> None:
    """Call ``at`` before and after each event by which this process changes the node."""
    exchange = NetlinkSocket.exchange

    def counted(self: NetlinkSocket, *arguments: Any, **more: Any) -> None:
        at()
        exchange(self, *arguments, **more)
        at()

    def audited(event: str, arguments: Any) -> None:
        if event in AUDITED or (event == "open" and isinstance(arguments[2], int) and arguments[2] & 3):
            at()

    NetlinkSocket.exchange = counted  # type: ignore[method-assign]
    sys.addaudithook(audited)


class Undisturbed(NamedTuple):
    """The events and duration of an undisturbed convergence."""

    events: int
    seconds: float


def measure(sweep: Sweep) -> Undisturbed:
    """Converge in a child process without killing it."""
    reader, writer = os.pipe()

    def work() -> None:
        seen = [0]
        _count_events(lambda: seen.__setitem__(0, seen[0] + 1))
        sweep.converge(AFTER)
        os.write(writer, str(seen[0]).encode())

    began = time.monotonic()
    child = _in_child(work)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    seconds = time.monotonic() - began
    events = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    return Undisturbed(events, seconds)


def kill(sweep: Sweep, undisturbed: Undisturbed, point: int, points: int) -> bool:
    """Kill a convergence at one of the points; return whether it was killed before its end."""
    share = (point + 0.5) / points
    whole_group = point // 2 % 2 == 0
    last = round(share * undisturbed.events) if point % 2 else None

    def end(process: int) -> None:
        (os.killpg if whole_group else os.kill)(process, signal.SIGKILL)

    def work() -> None:
        seen = [0]

        def at() -> None:
            seen[0] += 1
            if seen[0] == last:
                end(os.getpid())

        if last is not None:
            _count_events(at)
        sweep.converge(AFTER)

    child = _in_child(work)
    if last is None:
        time.sleep(share * undisturbed.seconds)
        end(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


class Traffic:
    """A process with the backends and a client that connects in turn to each Service that does not change."""

    def __init__(self) -> None:
        self._stop = FORK.Event()
        self._answered = FORK.Value("i", 0)
        self._failures = FORK.Queue()
        self._process = FORK.Process(target=self._run, daemon=True)
        self._process.start()

    def _run(self) -> None:
        servers = [Backend(number) for number in (1, 2, 3)]
        while not self._stop.is_set():
            for number in range(1, STEADY + 1):
                try:
                    with socket.create_connection((steady_address(number), 80), PATIENCE) as connection:
                        connection.settimeout(PATIENCE)
                        assert connection.recv(16).decode() in ("1", "2", "3")
                    self._answered.value += 1
                except (OSError, AssertionError) as error:
                    self._failures.put(f"{steady_address(number)}: {error!r}")
            time.sleep(0.02)
        assert len(servers) == 3

    def end(self) -> int:
        """Stop and return the number of answers. Raises AssertionError if a connection has failed."""
        self._stop.set()
        self._process.join(60)
        failures = []
        while not self._failures.empty():
            failures.append(self._failures.get())
        assert failures == []
        return int(self._answered.value)


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize(("mode", "variant"), MODES)
def test_a_killed_convergence_is_completed_by_the_next_one(
    mode: str, variant: str, points: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    for program in ("iptables", "ip6tables"):
        # Rules of another program, which determine the variant in use.
        subprocess.run([f"{program}-{variant}", "-A", "INPUT", "-p", "tcp", "--dport", "9", "-j", "DROP"], check=True)
    make_network()
    sweep = Sweep(mode, variant, tmp_path)
    sweep.converge(BEFORE)
    before = sweep.programmed()
    undisturbed = measure(sweep)
    after = sweep.programmed()
    assert before != after
    sweep.converge(BEFORE)
    assert sweep.programmed() == before
    traffic = Traffic()
    killed, whole, chosen = 0, 0, list(range(points))
    random.Random(points).shuffle(chosen)
    for point in chosen:
        killed += kill(sweep, undisturbed, point, points)
        whole += sweep.programmed() in (before, after)
        sweep.converge(AFTER)
        assert sweep.programmed() == after, f"point {point} of {points}"
        sweep.converge(BEFORE)
        assert sweep.programmed() == before, f"point {point} of {points}"
    answered = traffic.end()
    # Files of killed writers are removed once they are too old to belong to a running writer.
    for path in sweep.unfinished():
        os.utime(path, (0, 0))
    sweep.converge(AFTER)
    assert sweep.unfinished() == []
    sys.stdout.write(
        f"{mode}: {undisturbed.events} events in {undisturbed.seconds:.2f} s; {killed} of {points} died; the state was "
        f"whole {whole} times; {answered} connections to Services that did not change, none failed\n"
    )
    assert killed >= points // 2 and answered > points
