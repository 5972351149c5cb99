# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure convergences of a large cluster through the module service_proxy, from empty and without change.

``python -m tests.lab.uml -- python -m tests.benchmarks.converge_scale --mode ipvs``
``unshare -n python -m tests.benchmarks.converge_scale --mode iptables [--variant legacy]``

The module runs as on a node, as the program that Ansible sends. Each round starts in a separate network namespace.
Prints seconds by the clock, seconds of processor time in user mode and in the kernel, the largest resident memory and
the module's own account per stage: from empty, of the next run without a change, of one that observes in any case
(``always_observe``), and of a module that does nothing. In mode iptables the same text is given to iptables-restore
alone, for comparison. Exits 1 when a limit is missed: in mode ipvs 15 seconds from empty and 5 without change; in mode
iptables 1.5 times what iptables-restore takes. The best round counts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, Optional, Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.benchmarks.large_cluster import large_cluster, node_name, printed
from tests.benchmarks.payload import build_payload
from tests.lab import system

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.snapshot import canonical_snapshot

MODULE = "kubenode.proxy.service_proxy"
FROM_EMPTY_LIMIT = 15.0
UNCHANGED_LIMIT = 5.0
RESTORE_LIMIT = 1.5
_NOTHING = """from ansible.module_utils.basic import AnsibleModule

AnsibleModule(argument_spec={}).exit_json()
"""


class Measured(NamedTuple):
    """One run of a program: elapsed seconds, processor seconds, largest resident memory of a process, output."""

    wall: float
    user: float
    kernel: float
    mebibytes: float
    output: str


def timed(argv: Sequence[str], stdin: Optional[Path] = None) -> Measured:
    """Run a program to its end. Raises SystemExit with its words if it fails."""
    started = time.perf_counter()
    with open(stdin or os.devnull, "rb") as stream, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(argv, stdin=stream, stdout=output, stderr=subprocess.STDOUT)
        _pid, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - started
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(argv)}: {text[-4000:]}")
    return Measured(wall, usage.ru_utime, usage.ru_stime, usage.ru_maxrss / 1024, text)


def write_snapshot(path: Path, options: argparse.Namespace) -> None:
    """Write the cluster's state in the form and size of the options."""
    objects = large_cluster(options.services, options.endpoints)
    if options.no_affinity:
        for item in objects:
            item.get("spec", {}).pop("sessionAffinity", None)
    if options.snapshot == "kubectl":
        path.write_text(printed(objects), encoding="utf-8")
    else:
        path.write_bytes(gzip.compress(canonical_snapshot(objects)[0]))


class Bench:
    """The files of one measurement, and its rounds."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.directory = directory
        self.options = options
        self.snapshot = directory / ("snapshot.json" if options.snapshot == "kubectl" else "snapshot.json.gz")
        # In another process: the largest memory of a program includes that of the process that started it.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.apply(write_snapshot, (self.snapshot, options))

    def module(self, name: str, **more: Any) -> list[str]:
        """Return the command that runs the module with these options."""
        arguments: dict[str, Any] = {
            "snapshot": str(self.snapshot),
            "node_name": node_name(3),
            "mode": self.options.mode,
            "state_directory": str(self.directory / "state"),
            "configuration": {"nodePortAddresses": ["primary"]},
            **more,
        }
        path = self.directory / f"{name}.py"
        build_payload(MODULE, arguments, path)
        return [sys.executable, str(path)]

    def nothing(self) -> list[str]:
        """Return the command that runs a module that does nothing, the least that any module costs."""
        source, path = self.directory / "source.py", self.directory / "nothing.py"
        source.write_text(_NOTHING, encoding="utf-8")
        build_payload(str(source), {}, path)
        return [sys.executable, str(path)]

    def fresh_node(self) -> None:
        """Enter a network namespace that has a node's address, with the iptables variant in question in use."""
        system.unshare(system.CLONE_NEWNET)
        lines = ["link set lo up", "link add eth0 type veth peer name peer0", "address add 192.0.2.13/24 dev eth0"]
        system.ip_batch([*lines, "link set eth0 up", "link set peer0 up"])
        if self.options.mode == "iptables":
            for program in (f"iptables-{self.options.variant}", f"ip6tables-{self.options.variant}"):
                system.run([program, "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])


def report(title: str, measured: Measured) -> dict[str, float]:
    """Print one line with the longest stages, and return the seconds per stage."""
    stages: dict[str, float] = {}
    result: dict[str, Any] = {}
    if measured.output.strip().startswith("{"):
        result = json.loads(measured.output)
        stages = result.get("durations", {})
    counted = ""
    if "counts" in result:
        counts = result["counts"]
        counted = f" +{counts['added']} ~{counts['replaced']} -{counts['removed']};"
    named = ", ".join(f"{name} {seconds:.2f}" for name, seconds in stages.items() if seconds >= 0.01)
    sys.stdout.write(
        f"{title:<22} {measured.wall:6.2f} s, processor {measured.user:5.2f} + {measured.kernel:5.2f} s, "
        f"{measured.mebibytes:4.0f} MiB;{counted} {named}\n"
    )
    sys.stdout.flush()
    return stages


def restore_alone(bench: Bench) -> Measured:
    """Run iptables-restore with the same text in an empty namespace, as its own process."""
    result = json.loads(timed(bench.module("rendered", state="rendered", node_addresses=["192.0.2.13"])).output)
    texts = [text for name, text in result["rendered"].items() if name.startswith("iptables-restore")]
    path = bench.directory / "rules"
    path.write_text(max(texts, key=len), encoding="utf-8")
    bench.fresh_node()
    return timed([f"iptables-{bench.options.variant}-restore", "--noflush"], path)


def measure(bench: Bench) -> bool:
    """Run all rounds and return whether every limit is kept."""
    present = bench.module("present")
    observing = bench.module("observing", always_observe=True)
    nothing = bench.nothing()
    empty: list[float] = []
    unchanged: list[float] = []
    chains: list[float] = []
    alone: list[float] = []
    for _round in range(bench.options.rounds):
        bench.fresh_node()
        first = timed(present)
        stages = report("from empty", first)
        second = timed(present)
        report("without change", second)
        if json.loads(second.output)["changed"]:
            raise SystemExit("a second run finds changes")
        report("observed", timed(observing))
        report("module without work", timed(nothing))
        empty.append(first.wall)
        unchanged.append(second.wall)
        if bench.options.mode == "iptables":
            chains.append(stages["IPv4 chains"])
            restored = restore_alone(bench)
            report("iptables-restore alone", restored)
            alone.append(restored.wall)
    if chains:
        ratio = min(chains) / min(alone)
        sys.stdout.write(f"chains {min(chains):.2f} s, {ratio:.2f} times iptables-restore alone {min(alone):.2f} s\n")
        return bool(ratio <= RESTORE_LIMIT)
    sys.stdout.write(f"best: from empty {min(empty):.2f} s, without change {min(unchanged):.2f} s\n")
    return bench.options.mode != "ipvs" or (min(empty) < FROM_EMPTY_LIMIT and min(unchanged) < UNCHANGED_LIMIT)


def main(arguments: Sequence[str]) -> int:
    """Measure on the kernel this runs on."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.converge_scale", description="a large cluster")
    parser.add_argument("--mode", choices=("iptables", "ipvs", "nftables"), default="ipvs")
    parser.add_argument("--variant", choices=("legacy", "nft"), default="legacy", help="of iptables (default: legacy)")
    parser.add_argument("--services", type=int, default=5000)
    parser.add_argument("--endpoints", type=int, default=5, help="of each Service (default: 5)")
    parser.add_argument("--no-affinity", action="store_true", help="no Services with affinity of clients")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--snapshot", choices=("gathered", "kubectl"), default="gathered", help="its form")
    options = parser.parse_args(arguments)
    if os.geteuid() != 0:
        sys.stderr.write("error: programming a kernel needs root\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="kubenode-scale-") as directory:
        return 0 if measure(Bench(Path(directory), options)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
