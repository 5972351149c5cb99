# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run benchmarks one after the other, and print the machine, its load and how long each took.

Run as root from the top of the repository, best on a machine that does nothing else:

    .venv/bin/python -m tests.benchmarks [NAME...] [--output DIRECTORY] [--list]

Without names, every benchmark that needs no other program runs, which takes hours. What a benchmark prints is shown
and, with ``--output``, kept in ``DIRECTORY/NAME.txt`` below a description of the machine. The plots of its figures over
their size (:mod:`tests.benchmarks.plots`) are drawn beside it where matplotlib is installed. The exit status is 1 if a
benchmark failed or missed a limit of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator, NamedTuple

from tests.benchmarks import plots

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = ("unshare", "-n")
# User-mode Linux, whose kernel has IPVS, and Debian's kernel in an emulator, which has IPVS and nf_tables with NAT.
UML = (sys.executable, "-m", "tests.lab.uml", "--memory", "2G", "--")
QEMU = (sys.executable, "-m", "tests.lab.qemu", "--memory", "3G", "--timeout", "7200", "--")


class Benchmark(NamedTuple):
    """How a benchmark is run: the command before it, its module, and its arguments."""

    within: tuple[str, ...]
    module: str
    arguments: tuple[str, ...] = ()
    # The environment variable with the path of a program of others, without which the benchmark is not run.
    needs: str = ""

    @property
    def command(self) -> list[str]:
        """Return the whole command."""
        return [*self.within, sys.executable, "-m", f"tests.benchmarks.{self.module}", *self.arguments]


BENCHMARKS: dict[str, Benchmark] = {
    "agent-ipvs": Benchmark(UML, "agent_latency", ("--mode", "ipvs", "--services", "1000,5000")),
    "agent-iptables": Benchmark(NAMESPACE, "agent_latency", ("--mode", "iptables", "--services", "1000,5000")),
    "agent-memory": Benchmark(NAMESPACE, "agent_memory", ("--to", "iptables", "--sizes", "5000x5", "44000x1")),
    "agent-nftables": Benchmark(NAMESPACE, "agent_latency", ("--mode", "nftables", "--services", "1000,5000")),
    "agent-refill": Benchmark(NAMESPACE, "agent_refill"),
    "agent-start": Benchmark(NAMESPACE, "agent_start"),
    "api-servers": Benchmark((), "api_servers", needs="KUBENODE_HAPROXY"),
    "controller": Benchmark((), "controller_scale", ("--nodes", "1", "10", "50")),
    "boot-iptables": Benchmark((*NAMESPACE, "-m"), "boot", ("--mode", "iptables", "--services", "2000")),
    "boot-nftables": Benchmark((*NAMESPACE, "-m"), "boot", ("--mode", "nftables")),
    "converge-ipvs": Benchmark(UML, "converge_scale", ("--mode", "ipvs")),
    "converge-iptables": Benchmark(NAMESPACE, "converge_scale", ("--mode", "iptables")),
    "converge-nftables": Benchmark(
        NAMESPACE, "converge_scale", ("--mode", "nftables", "--services", "10000", "--endpoints", "10")
    ),
    "failed-endpoint": Benchmark((), "failed_endpoint"),
    "hashing": Benchmark((), "hashing"),
    "hostile-services": Benchmark((), "hostile_services"),
    "ipvs": Benchmark(UML, "ipvs_netlink"),
    "kube-proxy": Benchmark((), "kube_proxy", needs="KUBENODE_KUBE_PROXY"),
    "legacy-change": Benchmark(NAMESPACE, "legacy_change"),
    "libraries": Benchmark((), "libraries"),
    "many-agents": Benchmark(NAMESPACE, "many_agents"),
    "modes": Benchmark(QEMU, "modes_traffic"),
    "network-policy": Benchmark((), "network_policy"),
    "nftables": Benchmark((), "nftables_scale"),
    "nftables-affinity": Benchmark((), "nftables_affinity"),
    "nftables-traffic": Benchmark((), "nftables_traffic"),
    "policy-agent": Benchmark(NAMESPACE, "policy_agent"),
    "repair-ipvs": Benchmark(UML, "agent_repair", ("--mode", "ipvs")),
    "repair-iptables": Benchmark(NAMESPACE, "agent_repair", ("--mode", "iptables")),
    "repair-nftables": Benchmark(NAMESPACE, "agent_repair", ("--mode", "nftables")),
    "tenant-writes": Benchmark(NAMESPACE, "tenant_writes"),
    "traffic-counters": Benchmark((), "traffic_counters", ("--connections", "30000")),
    "userspace": Benchmark((), "userspace_traffic", needs="KUBENODE_HAPROXY"),
}


def processor() -> str:
    """Return the processor's name as the kernel states it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        name, _colon, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def machine() -> Iterator[str]:
    """Yield the lines that describe this machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield f"# commit {commit or 'unknown'}, {time.strftime('%Y-%m-%d', time.gmtime())}"
    yield f"# {os.cpu_count()} processors {processor()}, {memory:.0f} GiB"
    yield f"# Linux {platform.release()}, Python {platform.python_version()}"


def load() -> str:
    """Return the machine's load averages of 1, 5 and 15 minutes."""
    return " ".join(f"{average:.1f}" for average in os.getloadavg())


def run(name: str, benchmark: Benchmark) -> tuple[bool, str]:
    """Run a benchmark and show what it prints; return whether it succeeded, and the text with a heading."""
    lines = [f"# {name}: {' '.join(benchmark.command)}".replace(sys.executable, "python"), *machine()]
    lines.append(f"# load at the start: {load()}")
    print("\n".join(lines), flush=True)
    started = time.monotonic()
    process = subprocess.Popen(benchmark.command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip("\n"))
    status = process.wait()
    end = f"# {time.monotonic() - started:.0f} s, load at the end: {load()}, exit status {status}"
    print(end, flush=True)
    return status == 0, "\n".join([*lines, end, ""])


def choice(names: list[str]) -> dict[str, Benchmark]:
    """Return the named benchmarks, or all that can be run; report those that are skipped and why."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise SystemExit(f"no such benchmark: {', '.join(unknown)}; --list shows all")
    chosen = {}
    for name in names or BENCHMARKS:
        needs = BENCHMARKS[name].needs
        if needs and needs not in os.environ:
            print(f"# {name} is not run: the environment variable {needs} is not set", file=sys.stderr)
        else:
            chosen[name] = BENCHMARKS[name]
    return chosen


def main() -> int:
    """Run the chosen benchmarks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--output", type=Path, help="directory for the texts and plots")
    parser.add_argument("--list", action="store_true", help="only list the benchmarks and their commands")
    arguments = parser.parse_args()
    if arguments.list:
        for name, benchmark in BENCHMARKS.items():
            print(f"{name:18} {' '.join(benchmark.command).replace(sys.executable, 'python')}")
        return 0
    drawn = bool(arguments.output) and importlib.util.find_spec("matplotlib") is not None
    if arguments.output and not drawn:
        print("# no plots: matplotlib is not installed (requirements-benchmarks.txt)", file=sys.stderr)
    failed = []
    for name, benchmark in choice(arguments.names).items():
        succeeded, text = run(name, benchmark)
        if not succeeded:
            failed.append(name)
        elif arguments.output:
            arguments.output.mkdir(parents=True, exist_ok=True)
            (arguments.output / f"{name}.txt").write_text(text, encoding="utf-8")
            if drawn:
                plots.draw(name, text, arguments.output)
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
