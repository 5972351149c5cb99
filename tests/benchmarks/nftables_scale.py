# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure how nftables mode scales, beside the floor: the kernel's time for the same bytes, encoded beforehand.

Run as root from the top of the repository; works in its own network namespace and leaves nothing behind:

    .venv/bin/python -m tests.benchmarks.nftables_scale [--sizes 100x1,1000x10,...] [--changes 300] [--fills 3]
        [--hashed] [--processor-time] [--json]

Columns: Services x endpoints; seconds from routes to a programmed kernel, starting from nothing (rendering, difference,
encoding, kernel), its floor and their ratio; the longest single call into the kernel; seconds for observing everything
and finding no difference; milliseconds for one endpoint replaced, and for one more endpoint, at the median and at the
99th percentile, from route to kernel, with the floor's median; milliseconds for replacing an endpoint in one of a
hundred Services. The whole table is programmed and replayed several times (``--fills``), and the fastest run counts,
since other programs use the machine. With ``--hashed`` every Service is hashed (stable hashing). With
``--processor-time`` all times but the longest call are those of the processor, in this process and in the kernel on its
behalf.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from typing import Any, NamedTuple, Sequence

from tests import conftest  # noqa: F401  (makes the collection importable)
from tests.lab import system

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NO_POLICY, ServicePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.outcomes import Outcome
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.protocol import NETLINK_NETFILTER
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.socket import NetlinkSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.messages import (
    BATCH_BEGIN,
    BATCH_END,
    Encoder,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Planner
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.hashing import JHASH
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.keys import address_key, transport_key
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import (
    RENDERING,
    service_port_entries,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import (
    Endpoint,
    ServicePortInfo,
    ServicePortName,
)

SIZES = "100x1,100x10,1000x1,1000x10,10000x1,10000x10,44000x1,44000x10"
SETTINGS = DataplaneSettings(
    "IPv4",
    node_ip="172.18.0.2",
    local_traffic=LocalTraffic("cidr", "10.244.0.0/16"),
    node_port_cidrs=("172.18.0.2/32",),
    node_port_addresses=("172.18.0.2",),
    service_cidrs=("10.96.0.0/12",),
    schedulers=frozenset((JHASH,)),
)
clock = time.perf_counter
Entries = dict[Any, Any]


class Figures(NamedTuple):
    """One row of the table; seconds, except where the name says milliseconds."""

    services: int
    endpoints: int
    from_empty: float
    from_empty_floor: float
    ratio: float
    longest_call: float
    no_change: float
    replace_p50_ms: float
    replace_p99_ms: float
    replace_floor_ms: float
    add_p50_ms: float
    add_p99_ms: float
    add_floor_ms: float
    percent_changed_ms: float


def address(number: int, first: int) -> str:
    """Return the address with a number in a block of /8 that starts at a second octet."""
    return f"10.{first + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def route(number: int, endpoints: Sequence[Endpoint]) -> ServicePortInfo:
    """Return a ClusterIP Service."""
    chosen = tuple(endpoints)
    return ServicePortInfo(
        key=ServicePortName("bench", f"svc{number}", "", "TCP"),
        family="IPv4",
        cluster_ip=address(number, 96),
        port=80,
        node_port=0,
        external_ips=(),
        load_balancer_ips=(),
        source_ranges=None,
        affinity_seconds=0,
        internal_local=False,
        external_local=False,
        externally_accessible=False,
        uses_cluster_endpoints=True,
        uses_local_endpoints=False,
        health_check_node_port=0,
        endpoints=chosen,
        cluster=chosen,
        local=(),
        reachable=chosen,
        has_any=True,
    )


def routes(services: int, endpoints: int) -> list[ServicePortInfo]:
    """Return Services with the given number of endpoints each, all different."""
    return [
        route(number, [Endpoint(address(number * endpoints + each, 128), 8080) for each in range(endpoints)])
        for number in range(services)
    ]


def contribution(one: ServicePortInfo) -> Entries:
    """Return what a route contributes, by key."""
    return {key: value for _table, key, value in service_port_entries(one, SETTINGS)}


def sends(change: Change[Any, Any], sock: NetlinkSocket) -> list[bytes]:
    """Return the bytes that make a change, one item for each call into the kernel."""
    made = []
    for transaction in Planner(Encoder("IPv4")).transactions(change):
        batch = [BATCH_BEGIN, *(each.message for each in transaction.messages), BATCH_END]
        made += [data for data, _first, _last in sock.encode(batch, 1, False, True)]
    return made


def replay(sock: NetlinkSocket, data: Sequence[bytes]) -> float:
    """Return the seconds that the kernel takes for encoded transactions."""
    started = clock()
    outcome = Outcome([], [])
    for each in data:
        sock.exchange(each, 1, 1 << 30, outcome, False)
    taken = clock() - started
    if outcome.errors:
        raise SystemExit(f"the kernel refused: {outcome.errors[0]}")
    return taken


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def changed(one: ServicePortInfo, kind: str, turn: int) -> ServicePortInfo:
    """Return a route with its last endpoint replaced, or with one more."""
    fresh = Endpoint(address(turn, 250), 9090)
    kept = one.cluster[:-1] if kind == "replace" else one.cluster
    chosen = (*kept, fresh)
    return one._replace(endpoints=chosen, cluster=chosen, reachable=chosen)


def one_change(
    resource: NftablesResource, table: Entries, all_service_ports: list[ServicePortInfo], kind: str, turns: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of single changes, and of the same bytes replayed after each was undone."""
    taken, floors = [], []
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        for turn in range(turns):
            one = all_service_ports[turn * 7919 % len(all_service_ports)]
            other = changed(one, kind, turn)
            started = clock()
            before, after = contribution(one), contribution(other)
            change = difference(before, after)
            # Chains are shared: the agent counts who needs them.
            change.removed = {key: value for key, value in change.removed.items() if key[0] != "chain"}
            change.added = {key: value for key, value in change.added.items() if key not in table}
            resource.apply(change)
            taken.append(clock() - started)
            table.update(after)
            back = difference(after, before)
            back.removed = {key: value for key, value in back.removed.items() if key[0] != "chain"}
            back.added = {key: value for key, value in back.added.items() if key[0] != "chain"}
            resource.apply(back)
            again = Change({k: v for k, v in change.added.items() if k[0] != "chain"}, change.replaced, change.removed)
            floors.append(replay(sock, sends(again, sock)))
            resource.apply(back)
            table.update(before)
    return taken, floors


def fill(resource: NftablesResource, by_key: dict[Any, ServicePortInfo], fills: int) -> tuple[Entries, float]:
    """Program everything from empty, several times; the table, and the seconds of the fastest, rendering included."""
    taken = []
    for turn in range(fills):
        for cached in (address_key, transport_key):
            cached.cache_clear()
        started = clock()
        desired: Entries = RENDERING.desired_tables(by_key, SETTINGS)["table objects"]
        resource.apply(difference(resource.observe(), desired))
        taken.append(clock() - started)
        if turn < fills - 1:
            resource.apply(Change(removed=desired))
    return desired, min(taken)


def measure(services: int, endpoints: int, turns: int, fills: int, policy: ServicePolicy = NO_POLICY) -> Figures:
    """Return all figures for one size."""
    all_service_ports = [one._replace(policy=policy) for one in routes(services, endpoints)]
    by_key = {one.key: one for one in all_service_ports}
    gc.collect()
    gc.freeze()
    gc.disable()  # as the modules do, whose processes end soon
    with NftablesResource("IPv4") as resource:
        desired, from_empty = fill(resource, by_key, fills)
        longest = resource.longest_call
        started = clock()
        rest = difference(resource.observe(), desired)
        no_change = clock() - started
        if rest:
            raise SystemExit(f"{services}x{endpoints}: not converged: {len(rest)} differences")
        table = dict(desired)
        resource.longest_call = 0.0
        replaced, replaced_floor = one_change(resource, table, all_service_ports, "replace", turns)
        added, added_floor = one_change(resource, table, all_service_ports, "add", turns)
        change: Change[Any, Any] = Change()
        started = clock()
        for number, one in enumerate(all_service_ports[::100]):
            part = difference(contribution(one), contribution(changed(one, "replace", number)))
            change.replaced.update(part.replaced)
        resource.apply(change)
        percent = clock() - started
        longest = max(longest, resource.longest_call)
        started = clock()
        resource.apply(Change(removed=table))
        longest = max(longest, clock() - started)
    with NetlinkSocket(NETLINK_NETFILTER) as sock, NftablesResource("IPv4") as resource:
        data = sends(difference({}, desired), sock)
        floors = []
        for _turn in range(fills):
            floors.append(replay(sock, data))
            resource.apply(Change(removed=desired))
        floor = min(floors)
    gc.enable()
    gc.unfreeze()

    def ms(values: Sequence[float], share: float) -> float:
        return round(percentile(values, share) * 1000, 3)

    return Figures(
        services, endpoints, round(from_empty, 3), round(floor, 3), round(from_empty / floor, 2), round(longest, 4),
        round(no_change, 3), ms(replaced, 0.5), ms(replaced, 0.99), ms(replaced_floor, 0.5), ms(added, 0.5),
        ms(added, 0.99), ms(added_floor, 0.5), round(percent * 1000, 2),
    )  # fmt: skip


def main() -> None:
    """Measure every size and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--changes", type=int, default=300, help="single changes measured for each size")
    parser.add_argument("--fills", type=int, default=3, help="times that the whole table is programmed")
    parser.add_argument("--processor-time", action="store_true", help="measure that instead of elapsed time")
    parser.add_argument("--hashed", action="store_true", help="hash the clients of every Service")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    global clock
    clock = time.process_time if arguments.processor_time else time.perf_counter
    if os.geteuid() != 0:
        raise SystemExit("needs root, for a separate network namespace")
    system.unshare(system.CLONE_NEWNET)
    rows = []
    if not arguments.json:
        print(" | ".join(Figures._fields))
    for size in arguments.sizes.split(","):
        services, endpoints = map(int, size.split("x"))
        policy = ServicePolicy(scheduler="mh") if arguments.hashed else NO_POLICY
        rows.append(measure(services, endpoints, arguments.changes, arguments.fills, policy))
        if not arguments.json:
            print(" | ".join(map(str, rows[-1])), flush=True)
    if arguments.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))


if __name__ == "__main__":
    main()
