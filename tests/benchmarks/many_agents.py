# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what many agents cost an API server, and themselves: slopes over their number, with standard errors.

    unshare -n python -m tests.benchmarks.many_agents [--binaries DIRECTORY] [--agents 10 20 40 80] [--no-compression]
        [--omit-managed-fields]
    python -m tests.benchmarks.many_agents --server URL --ca FILE --token TOKEN [--server-process NUMBER]

Agents are the real code that talks to the API server (``simulated_agents``), many in each of two processes; the server
is the tests' own, with ``--binaries`` a kube-apiserver with an etcd, or a given one; with ``--binaries`` and
``--omit-managed-fields`` a kube-apiserver, then the tests' own that ignores the request, then the one that honours it.
For each number of agents a line of JSON with the requests, bytes, and seconds of processor time, of the server and of
all agents, that each phase took:

* ``start``: all agents at once, until each knows the whole cluster;
* ``rest``: this many seconds without a change;
* ``changes``: this many seconds with ``--rate`` changed EndpointSlices each;
* ``restart``: the API server is restarted, until all agents watch again, and ten seconds more.

The first line has the bytes of the lists of Services and EndpointSlices in the encodings that clients request: JSON, as
the agent, and protobuf, as kube-proxy, with and without compression; and of JSON with only what the agent reads.

The last line has for each of them the slope over the number of agents, per agent, by least squares, its standard error,
and the intercept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.lab import system

# isort: split

from tests.benchmarks.measured_servers import (
    GivenServer,
    KubeApiServer,
    OwnServer,
    kubeconfig_of,
    list_bytes,
    processor_seconds,
)
from tests.kernel.agent_node import ROOT
from tests.lab.background import Background

PROCESSES, PATIENCE, SETTLE_SECONDS = 2, 600.0, 10.0
#: So that no change repeats what a Service has already.
_TURNS = itertools.count(1)
MEASURES = ("requests", "bytes", "server_processor_s", "agent_processor_s")

Server = OwnServer | GivenServer if sys.version_info >= (3, 10) else Any


class Fleet:
    """The agents, in a few processes."""

    def __init__(self, kubeconfig: Path, number: int) -> None:
        shares = [number // PROCESSES + (index < number % PROCESSES) for index in range(PROCESSES)]
        self._number = number
        self._processes = [
            Background(
                [sys.executable, "-m", "tests.benchmarks.simulated_agents", str(kubeconfig), str(share)],
                input_pipe=True,
                cwd=str(ROOT),
            )
            for share in shares
            if share
        ]

    def counters(self) -> dict[str, float]:
        """Return the sums of all counters so far; the first call starts the agents."""
        total: dict[str, float] = {}
        for process in self._processes:
            assert process.process.stdin is not None
            process.process.stdin.write("counters\n")
            process.process.stdin.flush()
        for process in self._processes:
            assert process.process.stdout is not None
            for name, value in json.loads(process.process.stdout.readline()).items():
                total[name] = total.get(name, 0) + value
        return total

    def wait(self, name: str) -> None:
        """Wait until a counter has reached the number of agents."""
        end = time.monotonic() + PATIENCE
        while self.counters()[name] < self._number:
            if time.monotonic() > end:
                raise SystemExit(f"not all of {self._number} agents are {name}")
            time.sleep(0.5)

    def close(self) -> None:
        """End all of them."""
        for process in self._processes:
            process.close()


class Phases:
    """What each phase took, by its name."""

    def __init__(self, server: Server, fleet: Fleet) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self._server = server
        self._fleet = fleet

    def _now(self) -> dict[str, float]:
        return {**self._fleet.counters(), "server_processor_s": processor_seconds(self._server.pids)}

    def measure(self, name: str, act: Callable[[], object], restarted: bool = False) -> None:
        """Measure what happens while ``act`` runs. ``restarted``: the server is another process afterwards."""
        before, began = self._now(), time.monotonic()
        act()
        seconds, after = time.monotonic() - began, self._now()
        if restarted:
            before["server_processor_s"] = 0.0
        self.found[name] = {each: round(after[each] - before[each], 3) for each in (*MEASURES, "objects")}
        self.found[name]["seconds"] = round(seconds, 1)


def write_changes(server: Server, services: int, rate: float, seconds: float) -> None:
    """Replace the endpoints of one Service after the other, at a rate."""
    began = time.monotonic()
    turn = 0
    for number in range(int(rate * seconds)):
        turn = turn if number % services else next(_TURNS)
        server.change(number % services, turn)
        time.sleep(max(0.0, began + (number + 1) / rate - time.monotonic()))
    time.sleep(2.0)


def run(server: Server, kubeconfig: Path, agents: int, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return what each phase took with this number of agents."""
    fleet = Fleet(kubeconfig, agents)
    try:
        phases = Phases(server, fleet)
        phases.measure("start", lambda: fleet.wait("listed"))
        fleet.wait("connected")
        time.sleep(SETTLE_SECONDS)
        phases.measure("rest", lambda: time.sleep(arguments.seconds))
        phases.measure("changes", lambda: write_changes(server, arguments.services, arguments.rate, arguments.seconds))

        def restart() -> None:
            server.restart()
            time.sleep(2.0)
            fleet.wait("connected")
            time.sleep(SETTLE_SECONDS)

        if not isinstance(server, GivenServer) or isinstance(server, KubeApiServer):
            phases.measure("restart", restart, restarted=isinstance(server, KubeApiServer))
        return phases.found
    finally:
        fleet.close()


def slope(points: list[tuple[float, float]]) -> dict[str, float]:
    """Return slope, its standard error, and intercept of the line of least squares; no error for two points."""
    number = len(points)
    mean_x, mean_y = (sum(values) / number for values in zip(*points))
    spread = sum((x - mean_x) ** 2 for x, _y in points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    start = mean_y - rise * mean_x
    left = sum((y - start - rise * x) ** 2 for x, y in points)
    error = math.sqrt(left / (number - 2) / spread) if number > 2 else math.nan
    return {"slope": float(f"{rise:.4g}"), "error": float(f"{error:.2g}"), "intercept": float(f"{start:.4g}")}


def slopes(series: list[tuple[int, dict[str, dict[str, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the slopes of each phase and measure over the number of agents."""
    phases = series[0][1]
    return {
        phase: {
            measure: slope([(float(agents), found[phase][measure]) for agents, found in series]) for measure in MEASURES
        }
        for phase in phases
    }


def server_makers(arguments: argparse.Namespace) -> dict[str, Callable[[Path], Server]]:
    """Return what creates each server that the arguments name, with the cluster in it, by the name that is printed."""
    sizes = arguments.services, arguments.endpoints
    if arguments.server:
        given = arguments.server, arguments.ca, arguments.token
        return {"given": lambda _directory: GivenServer(*given, *sizes, pid=arguments.server_process)}
    own: dict[str, Callable[[Path], Server]] = {
        "tests.apiserver": lambda directory: OwnServer(directory, *sizes),
        "tests.apiserver, omits managed fields": lambda directory: OwnServer(directory, *sizes, omits=True),
    }
    if arguments.binaries:
        kube: dict[str, Callable[[Path], Server]] = {
            "kube-apiserver": lambda directory: KubeApiServer(arguments.binaries, directory, *sizes)
        }
        return {**kube, **own} if arguments.omit_managed_fields else kube
    name = list(own)[arguments.omit_managed_fields]
    return {name: own[name]}


def measure_server(name: str, make: Callable[[Path], Server], arguments: argparse.Namespace) -> None:
    """Print the lines of one server."""
    series = []
    with tempfile.TemporaryDirectory() as scratch:
        server = make(Path(scratch))
        try:
            sys.stdout.write(json.dumps({"server": name, "list_bytes": list_bytes(server)}) + "\n")
            kubeconfig = kubeconfig_of(server, Path(scratch) / "kubeconfig", not arguments.no_compression)
            for agents in arguments.agents:
                found = run(server, kubeconfig, agents, arguments)
                series.append((agents, found))
                line = {"server": name, "compression": not arguments.no_compression, "agents": agents}
                load = round(os.getloadavg()[0], 1)
                sys.stdout.write(json.dumps({**line, "load": load, "phases": found}) + "\n")
                sys.stdout.flush()
        finally:
            server.close()
    if len(series) > 1:
        sys.stdout.write(json.dumps({"server": name, "slopes": slopes(series)}) + "\n")


def main() -> int:
    """Print a line of JSON for each number of agents, and one with the slopes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", nargs="+", type=int, default=[10, 20, 40, 80])
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--endpoints", type=int, default=5, help="for each Service")
    parser.add_argument("--rate", type=float, default=10.0, help="changed EndpointSlices each second")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the phases rest and changes")
    parser.add_argument("--no-compression", action="store_true")
    parser.add_argument("--omit-managed-fields", action="store_true", help="the tests' own server honours KEP-5958")
    parser.add_argument("--binaries", type=Path, help="directory with kube-apiserver and etcd")
    parser.add_argument("--server", default="", metavar="URL", help="a server for tests only")
    parser.add_argument("--ca", type=Path)
    parser.add_argument("--token", default="")
    parser.add_argument("--server-process", type=int, default=0, help="number of its process, if it is on this machine")
    arguments = parser.parse_args()
    if not arguments.server:
        system.ip_batch(["link set lo up"])
    for name, make in server_makers(arguments).items():
        measure_server(name, make, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
