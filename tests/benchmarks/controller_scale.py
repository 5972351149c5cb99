# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what it costs the controller to converge many nodes by playbook.

``python -m tests.benchmarks.controller_scale --nodes 1 10 50 [--services 1000] [--tasks]``

Real playbook, real ssh: each node is a network namespace of this machine with its own sshd and file system, and runs
what Ansible sends it. For each number of nodes three runs: from empty, again without a change, and verify. Prints
seconds by the clock, the processor time of ansible-playbook with all its workers and ssh clients (not of the nodes) and
of its first process alone, which more processors do not make faster; the largest memory of these processes together
(proportional set size), the bytes on the wire to and from a node, and the machine's load. Since the nodes run on the
same processors, the seconds by the clock are worse than with real nodes; the processor time hardly is. ``--tasks`` adds
the seconds of each task by the clock. ``--live`` measures instead a live report of nodes with agents, which serve
a static Service. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple, Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.benchmarks.controller_fleet import ROOT, Fleet
from tests.benchmarks.large_cluster import large_cluster, node_name
from tests.lab.system import LabError

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.snapshot import canonical_snapshot

PR_SET_CHILD_SUBREAPER = 36
PLAYS = {"from empty": "converge", "without change": "converge", "verify": "verify"}
LIVE_PLAYS = {"live report": "report"}
#: The settings of examples/inventory-1000/ansible.cfg, except those of the output.
CONFIGURATION = """\
[defaults]
forks = {forks}
timeout = 60
[connection]
pipelining = true
[ssh_connection]
ssh_args = -o ControlMaster=auto -o ControlPersist=30m -o PreferredAuthentications=publickey
control_path_dir = {directory}/cp
retries = 3
"""
VARIABLES = """\
service_proxy_snapshot: {directory}/cluster.json.gz
service_proxy_mode: {mode}
service_proxy_configuration: {{nodePortAddresses: [primary], conntrack: {{maxPerCore: 0, min: 0}}}}
kernel_unchangeable: warn
proxy_report_live: {live}
proxy_report_html: {directory}/report.html
proxy_report_json: {directory}/report.json
"""


class Measured(NamedTuple):
    """One run: seconds by the clock, of processors, of the first process; MiB, bytes to and from nodes, tasks, load."""

    wall: float
    processor: float
    first: float
    memory: float
    sent: int
    received: int
    tasks: dict[str, float]
    load: float


class Memory(threading.Thread):
    """The memory of a process, its descendants and the orphans that this process has adopted."""

    def __init__(self, process: int, others: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self.process = process
        self.others = set(others)
        self.peak = 0.0
        self.seconds = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        """Sample four times a second."""
        while not self.ended.wait(0.25):
            self.peak = max(self.peak, sum(map(_memory, self._family())) / 1024)
            self.seconds = max(self.seconds, _seconds(self.process))

    def _family(self) -> list[int]:
        parents: dict[int, int] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    status = Path("/proc", name, "stat").read_text(encoding="ascii", errors="replace")
                    parents[int(name)] = int(status.rpartition(")")[2].split()[1])
        found = [pid for pid, parent in parents.items() if parent == os.getpid() and pid not in self.others]
        for process in found:
            found += [pid for pid, parent in parents.items() if parent == process]
        return found


def _memory(process: int) -> int:
    """Return the memory of a process in KiB, shared parts divided by their users."""
    try:
        text = Path("/proc", str(process), "smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"^Pss: +(\d+)", text, re.MULTILINE)
    return int(found.group(1)) if found else 0


def _seconds(process: int) -> float:
    """Return the processor seconds of a process without its children."""
    try:
        status = Path("/proc", str(process), "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    user, system = status.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Bench:
    """A fleet, and playbooks against a part of it."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.directory = directory
        self.options = options
        objects = large_cluster(options.services, options.endpoints)
        snapshot = gzip.compress(canonical_snapshot(objects)[0])
        self.size = len(snapshot)
        (directory / "cluster.json.gz").write_bytes(snapshot)
        (directory / "ansible.cfg").write_text(
            CONFIGURATION.format(directory=directory, forks=options.forks), encoding="utf-8"
        )
        text = VARIABLES.format(directory=directory, mode=options.mode, live=str(options.live).lower())
        (directory / "variables.yml").write_text(text, encoding="utf-8")

    def play(self, fleet: Fleet, playbook: str) -> Measured:
        """Run a playbook against the whole fleet."""
        argv = ["ip", "netns", "exec", fleet.controller, str(ROOT / ".venv/bin/ansible-playbook")]
        argv += ["-i", str(fleet.inventory), "-e", f"@{self.directory}/variables.yml", f"kubenode.proxy.{playbook}"]
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(self.directory / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_HOME": str(self.directory / "home"),
            "ANSIBLE_NOCOLOR": "1",
        }
        count = len(fleet.names)
        before, traffic, started = _children_seconds(), fleet.traffic(count), time.perf_counter()
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        memory = Memory(process.pid, [node.pid for node in fleet.processes])
        memory.start()
        lines: list[str] = []
        tasks: dict[str, float] = {}
        current, since = "start", time.perf_counter()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            found = re.match(r"TASK \[(.*)\]|PLAY (RECAP)", line)
            if found:
                now = time.perf_counter()
                tasks[current] = tasks.get(current, 0.0) + now - since
                current, since = found.group(1) or "end", now
        process.wait()
        wall = time.perf_counter() - started
        memory.ended.set()
        memory.join()
        after = fleet.traffic(count)
        self._end_connections(fleet)
        if process.returncode:
            raise SystemExit("".join(lines)[-5000:])
        return Measured(
            wall,
            _children_seconds() - before,
            memory.seconds,
            memory.peak,
            after[0] - traffic[0],
            after[1] - traffic[1],
            tasks,
            os.getloadavg()[0],
        )

    @staticmethod
    def _end_connections(fleet: Fleet) -> None:
        """End the ssh clients that stay in the background, so that their processor time is counted."""
        nodes = {node.pid for node in fleet.processes}
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                status = Path("/proc", name, "stat").read_text(encoding="ascii", errors="replace")
                if int(status.rpartition(")")[2].split()[1]) == os.getpid() and int(name) not in nodes:
                    os.kill(int(name), signal.SIGTERM)
                    os.waitpid(int(name), 0)


def report(title: str, count: int, measured: Measured) -> None:
    """Print one line."""
    sys.stdout.write(
        f"{count:>5} {title:<15} {measured.wall:7.1f} s, processor {measured.processor:7.1f} s "
        f"({measured.processor / count:5.2f} per node; first process {measured.first:.1f} s), "
        f"{measured.memory:6.0f} MiB, per node "
        f"{measured.sent / count / 1024:7.0f} KiB to, {measured.received / count / 1024:5.0f} KiB from; "
        f"load {measured.load:.1f}\n"
    )
    sys.stdout.flush()


def measure(directory: Path, options: argparse.Namespace) -> None:
    """Measure all numbers of nodes."""
    bench = Bench(directory, options)
    sys.stdout.write(f"snapshot {bench.size / 1024:.0f} KiB, mode {options.mode}\n")
    for count in options.nodes:
        place = directory / f"fleet{count}"
        place.mkdir()
        names = [node_name(number) if count <= 20 else f"worker-{number:04}" for number in range(count)]
        with Fleet(place, names) as fleet:
            if options.live:
                fleet.start_agents()
            for title, playbook in list((LIVE_PLAYS if options.live else PLAYS).items())[: options.plays]:
                measured = bench.play(fleet, playbook)
                report(title, count, measured)
                if options.tasks:
                    longest = sorted(measured.tasks.items(), key=lambda item: -item[1])
                    sys.stdout.write("".join(f"      {seconds:6.2f} s {name}\n" for name, seconds in longest[:20]))
        shutil.rmtree(place)


def main(arguments: Sequence[str]) -> int:
    """Measure on this machine."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.controller_scale", description="many nodes")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--endpoints", type=int, default=5, help="of each Service (default: 5)")
    parser.add_argument("--forks", type=int, default=100, help="of Ansible (default: 100)")
    parser.add_argument("--mode", choices=("iptables", "nftables"), default="nftables")
    parser.add_argument("--plays", type=int, default=len(PLAYS), help="how many of these: " + ", ".join(PLAYS))
    parser.add_argument("--live", action="store_true", help="measure a live report of nodes with agents instead")
    parser.add_argument("--tasks", action="store_true", help="also print the longest tasks")
    options = parser.parse_args(arguments)
    if os.geteuid() != 0:
        sys.stderr.write("error: network namespaces need root\n")
        return 2
    # Adopt the ssh clients that Ansible leaves in the background.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.stderr.write("error: this process cannot adopt others\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="knb-") as directory:
        try:
            measure(Path(directory), options)
        except LabError as error:
            sys.stderr.write(f"error: {error}\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
