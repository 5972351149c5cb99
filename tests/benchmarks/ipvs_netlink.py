# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure virtual and real servers from empty, compared with a replay of the same bytes, encoded beforehand.

``python -m tests.lab.uml -- python -m tests.benchmarks.ipvs_netlink [--runs 10]``

Each measurement has a separate network namespace, so that the kernel's list of recently deleted real servers, which it
searches for every new one, is short. Prints one line per size; exits 1 if encoding and sending takes more than three
times what the replay takes.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from typing import NamedTuple, Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.lab import system

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs import messages as messages
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.servers import (
    IpvsSocket,
    RealServersResource,
    VirtualServersResource,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.encoding import encode_ready
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.outcomes import Outcome
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServer,
    RealServerKey,
    VirtualServer,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Stage, apply_plan, plan

SIZES = ((1000, 10), (5000, 5))
LIMIT = 3.0

Servers = dict[VirtualServerKey, VirtualServer]
RealServers = dict[RealServerKey, RealServer]


class Seconds(NamedTuple):
    """Seconds of one run: encoding and sending tables, replay of encoded bytes, observation, a run without change."""

    converged: float
    replayed: float
    observed: float
    unchanged: float


def state(services: int, endpoints: int) -> tuple[Servers, RealServers]:
    """Return tables of that many virtual servers with that many real servers each."""
    servers: Servers = {}
    real_servers: RealServers = {}
    for number in range(services):
        key = VirtualServerKey("tcp", f"10.{96 + number // 60000}.{number // 250 % 250}.{number % 250 + 1}", 80)
        servers[key] = VirtualServer("rr", 0, 0, 32)
        for endpoint in range(endpoints):
            pod = number * endpoints + endpoint
            ip = f"10.{200 + pod // 62500}.{pod // 250 % 250}.{pod % 250 + 1}"
            real_servers[RealServerKey(key, ip, 8080)] = RealServer(1)
    return servers, real_servers


def encoded(sock: IpvsSocket, servers: Servers, real_servers: RealServers) -> list[tuple[bytearray, int, int]]:
    """Return the messages, one item for each send, that create the tables."""
    services = messages.ServiceEncoder(sock.family_id)
    batch = [services.message(messages.NEW_SERVICE, key, value) for key, value in servers.items()]
    batch += messages.RealServerEncoder(sock.family_id).messages(messages.NEW_DEST, real_servers.items())
    sends = []
    first = 1
    for chunk in sock.netlink.chunks(batch):
        sends.append((encode_ready(chunk, first, sock.netlink.port), first, first + len(chunk) - 1))
        first += len(chunk)
    return sends


def own_namespace() -> None:
    """Enter a fresh network namespace with loopback up, without which IPVS refuses real servers."""
    system.unshare(system.CLONE_NEWNET)
    system.ip_batch(["link set lo up"])


def replay(servers: Servers, real_servers: RealServers) -> float:
    """Return the seconds of the kernel alone: bytes out, answers in."""
    own_namespace()
    with IpvsSocket() as sock:
        sends = encoded(sock, servers, real_servers)
        outcome = Outcome([], [])
        started = time.perf_counter()
        for data, _first, last in sends:
            sock.netlink.exchange(data, 1, last, outcome)
        seconds = time.perf_counter() - started
        if outcome.errors or RealServersResource(sock).observe() != real_servers:
            raise SystemExit(f"the replay was refused: {outcome.errors[:1]}")
    return seconds


def converge(servers: Servers, real_servers: RealServers) -> tuple[float, float, float]:
    """Return the seconds of applying to an empty kernel, of observing, and of a further run without a change."""
    own_namespace()
    with IpvsSocket() as sock:
        resources = (VirtualServersResource(sock), RealServersResource(sock))
        planned = plan([Stage(resources[0], servers), Stage(resources[1], real_servers)])
        started = time.perf_counter()
        apply_plan(planned)
        applied = time.perf_counter()
        seen = (resources[0].observe(), resources[1].observe())
        observed = time.perf_counter()
        if seen != (servers, real_servers):
            raise SystemExit("what the kernel holds is not what was applied")
        compared = time.perf_counter()
        planned = plan([Stage(resources[0], servers), Stage(resources[1], real_servers)])
        apply_plan(planned)
        unchanged = time.perf_counter() - compared
        if any(one.change for one in planned):
            raise SystemExit("a second run finds changes")
    return applied - started, observed - applied, unchanged


def measure(services: int, endpoints: int) -> Seconds:
    """Measure each once."""
    servers, real_servers = state(services, endpoints)
    gc.collect()
    gc.freeze()
    converged, observed, unchanged = converge(servers, real_servers)
    return Seconds(converged, replay(servers, real_servers), observed, unchanged)


def main(arguments: Sequence[str]) -> int:
    """Measure all sizes and judge the best run of each."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ipvs_netlink", description="virtual servers")
    parser.add_argument("--runs", type=int, default=10, help="measurements of each size; the best counts (default: 10)")
    options = parser.parse_args(arguments)
    if os.geteuid() != 0:
        sys.stderr.write("error: virtual servers need root\n")
        return 2
    worst = 0.0
    for services, endpoints in SIZES:
        runs = [measure(services, endpoints) for _run in range(options.runs)]
        best = Seconds(*(min(run[column] for run in runs) for column in range(4)))
        ratio = best.converged / best.replayed
        worst = max(worst, ratio)
        sys.stdout.write(
            f"{services} x {endpoints}: encode and send {best.converged:.3f} s, replay {best.replayed:.3f} s, "
            f"ratio {ratio:.2f}; observe {best.observed:.3f} s, run without change {best.unchanged:.3f} s\n"
        )
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
