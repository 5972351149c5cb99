# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what session affinity costs in nftables mode: a set of clients for each endpoint.

Run as root from the top of the repository; works in its own network namespace and leaves nothing behind:

    .venv/bin/python -m tests.benchmarks.nftables_affinity [--services 400,880,1760] [--endpoints 10]

Columns: Services with affinity, their sets; seconds of processor time, in this process and of these in the kernel, for
programming them from empty, and the longest single call into the kernel by the clock; the same for removing them from a
table that keeps as many other Services; seconds in the kernel for as many Services without affinity.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
from typing import Any, NamedTuple

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.benchmarks.nftables_scale import SETTINGS, address, route
from tests.lab import system

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import Endpoint, ServicePortInfo

SERVICES = "400,880,1760"
_TIMEOUT_SECONDS = 10800


class Spent(NamedTuple):
    """Seconds of one change: of processor time, of these in the kernel; by the clock, its longest call."""

    processor: float
    system: float
    longest_call: float


def table(services: list[ServicePortInfo]) -> dict[Any, Any]:
    """Return the table of these Services."""
    return dict(RENDERING.desired_tables({one.key: one for one in services}, SETTINGS)["table objects"])


def changed(kernel: NftablesResource, before: dict[Any, Any], after: dict[Any, Any]) -> Spent:
    """Turn one table into another and return what it cost."""
    change = difference(before, after)
    kernel.longest_call = 0.0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    kernel.apply(change)
    done = resource.getrusage(resource.RUSAGE_SELF)
    system_seconds = done.ru_stime - usage.ru_stime
    return Spent(done.ru_utime - usage.ru_utime + system_seconds, system_seconds, kernel.longest_call)


def measure(services: int, endpoints: int) -> str:
    """Return one row."""
    plain = [
        route(number, [Endpoint(address(number * endpoints + each, 128), 8080) for each in range(endpoints)])
        for number in range(2 * services)
    ]
    sticky = [one._replace(affinity_seconds=_TIMEOUT_SECONDS) for one in plain[:services]]
    kept = plain[services:]
    gc.collect()
    gc.disable()  # as the modules do
    with NftablesResource("IPv4") as kernel:
        without = changed(kernel, {}, table(plain))
        changed(kernel, table(plain), {})
        both = table([*sticky, *kept])
        filled = changed(kernel, {}, both)
        removed = changed(kernel, both, table(kept))
        changed(kernel, table(kept), {})
    gc.enable()
    sets = sum(key.kind == "set" and key.name.startswith("affinity-") for key in both)
    figures = [f"{seconds:.2f}" for spent in (filled, removed) for seconds in spent]
    return " | ".join([str(services), str(sets), *figures, f"{without.system:.2f}"])


def main() -> None:
    """Measure every size and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--services", default=SERVICES, help="numbers of Services with affinity")
    parser.add_argument("--endpoints", type=int, default=10, help="of each Service")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("needs root, for a separate network namespace")
    system.unshare(system.CLONE_NEWNET)
    print(
        "services | sets | from empty | of it system | longest call | removal | of it system | longest call | "
        "system without affinity"
    )
    for services in arguments.services.split(","):
        print(measure(int(services), arguments.endpoints), flush=True)


if __name__ == "__main__":
    main()
