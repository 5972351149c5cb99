# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what a node needs at boot to restore its last state, as its unit does, without any other program running.

``unshare -n -m python -m tests.benchmarks.boot --mode nftables``

Keeps the state of a large cluster below a memory file system, and runs the program that was kept with it in the empty
network namespace of the caller. Prints seconds by the clock, and of processor time, of each round and of an interpreter
that does nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.benchmarks.converge_scale import timed
from tests.benchmarks.large_cluster import large_cluster, node_name

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import boot_directory, boot_keeping
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.boot_state import BootSettings, NextBoot

PYTHON = ["/usr/bin/python3", "-I", "-B"]
RUNTIME = "/run/kubenode-proxy"


def keep(services: int, endpoints: int, mode: str) -> None:
    """Keep the state of a cluster of this size, as a convergence does. Raises SystemExit if it cannot be kept."""
    items, configuration = large_cluster(services, endpoints), {"mode": mode}
    os.makedirs(RUNTIME, exist_ok=True)
    request = Request(ClusterState.from_objects(items), load(configuration).configuration, objects=lambda: iter(items))
    addresses = (("lo", "127.0.0.1"),)
    next_boot = NextBoot(BootSettings(configuration), True)
    problems = boot_keeping.keep(request, next_boot, mode, node_name(0), addresses, confirmed=True)
    if problems:
        raise SystemExit("; ".join(problems))


def clean(mode: str) -> None:
    """Remove what a round has programmed and recorded."""
    shutil.rmtree(RUNTIME, ignore_errors=True)
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    if mode == "iptables":
        for table in ("filter", "nat", "mangle"):
            subprocess.run(["iptables-legacy-restore"], input=f"*{table}\nCOMMIT\n", text=True, check=False)


def main() -> None:
    """Measure three rounds of one mode."""
    parser = argparse.ArgumentParser(description="Measure the restoration of a state at boot.")
    parser.add_argument("--mode", default="nftables", choices=["nftables", "iptables"])
    parser.add_argument("--services", type=int, default=5000)
    parser.add_argument("--endpoints", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for directory in ("/run", "/var/lib"):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], check=True)
    keep(options.services, options.endpoints, options.mode)
    program = boot_directory.path_of(boot_directory.PROGRAM)
    rows: list[str] = []
    for _round in range(options.rounds):
        clean(options.mode)
        done = timed([*PYTHON, program, "--max-age", "604800"])
        if "is restored in" not in done.output:
            raise SystemExit(done.output)
        rows.append(f"{done.wall:6.2f} s  {done.user + done.kernel:6.2f} s of a processor  {done.mebibytes:4.0f} MiB")
    nothing = timed([*PYTHON, "-c", ""])
    size = os.path.getsize(boot_directory.path_of(boot_directory.STATE))
    print(f"{options.mode}, {options.services} Services x {options.endpoints} endpoints, a file of {size >> 10} KiB")
    print("\n".join(rows))
    words = "an interpreter that does nothing"
    print(f"{nothing.wall:6.2f} s  {nothing.user + nothing.kernel:6.2f} s of a processor  {words}")


if __name__ == "__main__":
    main()
