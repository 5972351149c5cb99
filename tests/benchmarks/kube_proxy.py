# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure the agent and kube-proxy in the same way: start, one change after the other, a burst of changes, and idling.

    KUBENODE_KUBE_PROXY=/path/to/kube-proxy python -m tests.benchmarks.kube_proxy [--modes nftables,iptables]
        [--services 5000] [--endpoints 5] [--changes 20] [--burst 100]

Both run in turn with the default configuration, each in a new network namespace, against the test API server on the
same machine, which answers both with JSON. iptables mode uses iptables-nft. Columns: program and mode; from exec until
the kernel has everything, by the clock and in processor seconds; milliseconds from the write of an EndpointSlice that
replaces one endpoint until the kernel notifies the new address, median and 90th percentile, one change after the other
with pauses of three seconds; processor milliseconds for each of these changes; a burst of changes of as many Services,
seconds until the kernel has notified all of them, and processor seconds until 45 seconds later; resident memory in MiB
after that; the share of a processor in an idle minute. Processor time is that of the program and of those that it has
run (nft, iptables-restore).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import select
import socket
import subprocess
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Iterable, NamedTuple, Optional, Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_slice
from tests.lab import manifests, system
from tests.lab.manifests import Object

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.listener import NetlinkListener
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.protocol import NETLINK_NETFILTER
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.attributes import NFNLGRP_NFTABLES
from tests.benchmarks.agent_runs import fill
from tests.benchmarks.nftables_scale import percentile

#: The environment variable with the path of kube-proxy.
BINARY = "KUBENODE_KUBE_PROXY"
VARIANT = "nft"
#: The kernel has everything when it has notified nothing for so long, and lists the last Service.
QUIET_SECONDS = 5.0
PAUSE_SECONDS = 3.0
#: What follows a change belongs to it: chains that are no longer used are removed seconds later, and the agent writes
#: the cluster's state to disk 30 seconds later.
REST_SECONDS = 45.0
IDLE_SECONDS = 60.0
#: As kube-apiserver, which sends an idle watch about one bookmark in a minute.
BOOKMARK_SECONDS = 60.0
PATIENCE_SECONDS = 1800.0


class Row(NamedTuple):
    """One line of the table."""

    program: str
    mode: str
    start_s: float
    start_processor_s: float
    change_p50_ms: float
    change_p90_ms: float
    change_processor_ms: float
    burst_s: float
    burst_processor_s: float
    memory_mib: float
    idle_percent: float
    load: float


class Moment(NamedTuple):
    """When something happened, and the processor seconds that the program had used until then."""

    clock: float
    processor: float


class ProxyNode(AgentNode):
    """A node with the agent, with its default configuration."""

    program = "this project"

    def __init__(self, scratch: Path, mode: str) -> None:
        super().__init__(scratch, mode, VARIANT if mode == "iptables" else "")
        for name in ("iptables", "ipvs", "nftables"):
            del self.configuration[name]
        self.write_configuration()
        if self.api is not None:
            self.api.bookmark_seconds = BOOKMARK_SECONDS

    def used(self) -> float:
        """Return the processor seconds so far. Raises SystemExit if the program has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise SystemExit(f"{self.program} has ended:\n{self.log[-3000:]}")
        return self.processor_seconds()


class KubeProxyNode(ProxyNode):
    """A node with kube-proxy."""

    program = "kube-proxy"

    def start(self, wait: bool = True) -> None:
        """Start kube-proxy; ``wait`` has no meaning here."""
        self.starts += 1
        client = {"kubeconfig": str(self.kubeconfig), "contentType": "application/json"}
        configuration = {**self.configuration, "clientConnection": client}
        path = self.scratch / "kube-proxy.json"
        path.write_text(json.dumps(configuration))
        with open(self.scratch / f"agent-{self.starts}.log", "wb") as log:
            command = [os.environ[BINARY], "--config", str(path)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.scratch, env=self.environment)


def quiet(node: ProxyNode, events: NetlinkListener, service: str) -> Moment:
    """Wait until the kernel has everything, of which the last Service is a part.

    Return when it had the last of it, and the processor time at the end, when programs that were run have ended.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    last: Optional[float] = None
    listing: Optional[Future[str]] = None
    with ThreadPoolExecutor(1) as pool:
        while time.monotonic() < deadline:
            select.select([events.fileno()], (), (), 0.2)
            node.used()
            # Read all: the socket's buffer holds the notifications of a few thousand Services only.
            if list(events.notifications()):
                last, listing = time.monotonic(), None
            elif last is None or time.monotonic() - last < QUIET_SECONDS:
                continue
            elif listing is None:
                # In a thread, since it takes seconds, in which more may be programmed.
                listing = pool.submit(node.kernel_text, VARIANT)
            elif listing.done():
                if service in listing.result():
                    return Moment(last, node.used())
                listing = None
    raise SystemExit(f"{node.program}: not programmed within {PATIENCE_SECONDS:g} seconds:\n{node.log[-3000:]}")


def replacement(number: int) -> str:
    """Return an address that no endpoint had before."""
    return f"10.{200 + number // 65536}.{number // 256 % 256}.{number % 256}"


def changed_slice(service: int, endpoints: int, address: str) -> Object:
    """Return the EndpointSlice of a Service with one endpoint replaced."""
    found = endpoint_slice(service, count=endpoints)
    found["endpoints"][0] = manifests.endpoint(address, "node2")
    return found


def wait_for_addresses(node: ProxyNode, events: NetlinkListener, addresses: list[str]) -> float:
    """Wait until the kernel has notified all these addresses and return the time."""
    missing: set[bytes] = {socket.inet_aton(address) for address in addresses}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while missing:
        if time.monotonic() > deadline:
            raise SystemExit(f"{node.program}: a change has not arrived:\n{node.log[-3000:]}")
        select.select([events.fileno()], (), (), 0.2)
        for event in events.notifications():
            payload = bytes(event.payload)
            missing = {address for address in missing if address not in payload}
            if not missing:
                return time.monotonic()
    return time.monotonic()


def single_changes(node: ProxyNode, events: NetlinkListener, numbers: Iterable[int], endpoints: int) -> list[float]:
    """Replace one endpoint of each of these Services, one after the other; return the seconds of each."""
    taken = []
    for number in numbers:
        list(events.notifications())
        address = replacement(number)
        started = time.monotonic()
        node.store.put(changed_slice(number, endpoints, address))
        taken.append(wait_for_addresses(node, events, [address]) - started)
        time.sleep(PAUSE_SECONDS)
    return taken


def burst_of_changes(node: ProxyNode, events: NetlinkListener, numbers: Sequence[int], endpoints: int) -> float:
    """Replace one endpoint of all these Services at once; return the seconds until the kernel has all of it."""
    list(events.notifications())
    started = time.monotonic()
    for number in numbers:
        node.store.put(changed_slice(number, endpoints, replacement(number)))
    return wait_for_addresses(node, events, [replacement(number) for number in numbers]) - started


def measure(kind: str, mode: str, arguments: argparse.Namespace) -> Row:
    """Measure one program in a mode; the calling process gets a new network namespace."""
    system.unshare(system.CLONE_NEWNET)
    system.ip_batch(["link set lo up", "address add 192.0.2.1/32 dev lo"])
    services, endpoints, changes = arguments.services, arguments.endpoints, arguments.changes
    with tempfile.TemporaryDirectory() as scratch:
        node = (KubeProxyNode if kind == KubeProxyNode.program else ProxyNode)(Path(scratch), mode)
        try:
            fill(node, services, endpoints)
            events = NetlinkListener(NETLINK_NETFILTER, (NFNLGRP_NFTABLES,), "nf_tables")
            began = time.monotonic()
            node.start(wait=False)
            programmed = quiet(node, events, cluster_ip(services))
            time.sleep(PAUSE_SECONDS)
            ready = node.used()
            taken = sorted(single_changes(node, events, range(1, changes + 1), endpoints))
            changed = node.used()
            burst = burst_of_changes(node, events, range(changes + 1, changes + 1 + arguments.burst), endpoints)
            time.sleep(REST_SECONDS)
            rested = node.used()
            time.sleep(IDLE_SECONDS)
            return Row(
                program=kind,
                mode=mode,
                start_s=round(programmed.clock - began, 2),
                start_processor_s=round(programmed.processor, 2),
                change_p50_ms=round(percentile(taken, 0.5) * 1000, 1),
                change_p90_ms=round(percentile(taken, 0.9) * 1000, 1),
                change_processor_ms=round((changed - ready) / changes * 1000, 1),
                burst_s=round(burst, 2),
                burst_processor_s=round(rested - changed, 2),
                memory_mib=round(node.resident_mebibytes()),
                idle_percent=round((node.used() - rested) / IDLE_SECONDS * 100, 2),
                load=round(os.getloadavg()[0], 1),
            )
        finally:
            node.close()


def main() -> None:
    """Measure both programs in each mode and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--modes", default="nftables,iptables")
    parser.add_argument("--services", type=int, default=5000)
    parser.add_argument("--endpoints", type=int, default=5)
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--burst", type=int, default=100)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("needs root, for separate network namespaces")
    programs = [ProxyNode.program]
    if os.environ.get(BINARY):
        programs.append(KubeProxyNode.program)
    else:
        print(f"no rows for kube-proxy: the environment variable {BINARY} is not set")
    print(" | ".join(Row._fields))
    for mode in arguments.modes.split(","):
        for program in programs:
            # A process each, since namespaces and children's processor time are those of a process.
            with multiprocessing.get_context("fork").Pool(1) as pool:
                print(" | ".join(map(str, pool.apply(measure, (program, mode, arguments)))), flush=True)


if __name__ == "__main__":
    main()
