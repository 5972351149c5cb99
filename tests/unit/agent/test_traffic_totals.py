# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The totals of traffic over counters that the kernel resets, and the choice of ServicePorts that have metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.metric_tables import TRAFFIC
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.metrics import Metrics
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.traffic import (
    HALF_LIFE_SECONDS,
    Busiest,
    Measured,
    MeasuredPort,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.traffic.account import (
    UNCOUNTED,
    CountedElement,
    Sample,
    TrafficAccount,
    connections_only,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.traffic.resets import counters_reset
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.traffic.samples import revived
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.statistics import (
    RealServerStatistics,
    Statistics,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.counters import (
    EndpointChain,
    parse_counters,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServer,
    RealServerKey,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import (
    ElementKey,
    ObjectKey,
    SetValue,
    index_bytes,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, Kind, PlannedChange, Resource
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortName

WEB = ServicePortName("shop", "web", "http", "TCP")
DB = ServicePortName("shop", "db", "", "TCP")
A, B = "10.244.1.1:80", "10.244.1.2:80"


def chain(name: str, endpoint: str, count: int) -> list:
    """Return the samples of the chain of an endpoint of WEB."""
    return [Sample(name, WEB, endpoint, connections_only(count)), Sample(name, WEB, "", connections_only(count))]


def row(account: TrafficAccount, port: ServicePortName = WEB) -> dict:
    return next(item for item in account.document("IPv4") if item["name"] == port.name)


def endpoints(account: TrafficAccount) -> dict:
    return {item["endpoint"]: item["connections"] for item in row(account)["endpoints"]}


def test_what_the_kernel_had_counted_before_the_first_reading_is_included() -> None:
    account = TrafficAccount()
    account.update([WEB, DB], [*chain("a", A, 5), *chain("b", B, 7)], 10.0)
    assert (row(account)["connections"], endpoints(account)) == (12, {A: 5, B: 7})
    assert row(account)["resetAt"] == 0
    # Nothing counts its traffic: not zero.
    assert row(account, DB)["connections"] is None


def test_a_counter_that_fell_was_reset() -> None:
    account = TrafficAccount()
    account.update([WEB], chain("a", A, 5), 10.0)
    account.update([WEB], chain("a", A, 2), 20.0)
    assert (row(account)["connections"], endpoints(account)) == (7, {A: 7})
    assert (row(account)["resetAt"], row(account)["endpoints"][0]["resetAt"]) == (20.0, 20.0)


def test_a_counter_that_was_created_again_counts_from_zero_even_if_it_is_higher_than_before() -> None:
    account = TrafficAccount()
    account.update([WEB], [*chain("a", A, 5)], 10.0)
    account.forget({"a"}, 15.0)
    account.update([WEB], [*chain("a", A, 9)], 20.0)
    assert row(account)["connections"] == 14
    assert row(account)["resetAt"] == 15.0


def test_a_set_that_was_created_again_counts_from_zero_and_others_do_not() -> None:
    def samples(count: int) -> list:
        frontends, endpoints, bytes_in = (CountedElement(name, b"k") for name in ("frontends", "endpoints", "bytes"))
        return [
            Sample(frontends, WEB, "", connections_only(count)),
            Sample(endpoints, DB, "", connections_only(count)),
            Sample(bytes_in, WEB, "", (None, count, None, 60 * count, None)),
            Sample("chain", DB, A, connections_only(count)),
        ]

    account = TrafficAccount()
    account.update([WEB, DB], samples(5), 10.0)
    account.forget({CountedElement("frontends")}, 15.0)
    account.update([WEB, DB], samples(9), 20.0)
    web, db = row(account), row(account, DB)
    assert [web[name] for name in ("connections", "packetsIn", "packetsOut", "bytesIn")] == [14, 9, None, 540]
    assert (web["resetAt"], db["connections"], db["resetAt"], db["endpoints"][0]["connections"]) == (15.0, 9, 0, 9)


def test_the_total_of_a_port_outlasts_its_endpoints() -> None:
    account = TrafficAccount()
    account.update([WEB], [*chain("a", A, 5), *chain("b", B, 7)], 10.0)
    account.update([WEB], chain("b", B, 8), 20.0)
    assert (row(account)["connections"], endpoints(account)) == (13, {B: 8})
    # What the chain had counted since the first reading is lost.
    assert row(account)["resetAt"] == 20.0
    account.update([WEB], [*chain("a", A, 1), *chain("b", B, 8)], 30.0)
    assert (row(account)["connections"], endpoints(account)) == (14, {A: 1, B: 8})


def test_a_removed_service_is_forgotten() -> None:
    account = TrafficAccount()
    account.update([WEB, DB], chain("a", A, 5), 10.0)
    account.update([DB], [], 20.0)
    assert [item["name"] for item in account.document("IPv4")] == ["db"]


def test_an_element_of_a_map_that_leads_to_another_endpoint_counts_for_that_one() -> None:
    account = TrafficAccount()
    account.update([WEB], [Sample(("map", 0), WEB, A, connections_only(5))], 10.0)
    account.update([WEB], [Sample(("map", 0), WEB, B, connections_only(6))], 20.0)
    assert endpoints(account) == {B: 6}


def test_open_connections_are_those_of_the_last_reading() -> None:
    account = TrafficAccount()
    numbers = (1, 2, 3, 4, 5)
    account.update([WEB], [Sample("vs", WEB, "", numbers, 4, 1), Sample("vs2", WEB, "", numbers, 1, 0)], 10.0)
    assert (row(account)["active"], row(account)["inactive"], row(account)["bytesOut"]) == (5, 1, 10)
    account.update([WEB], [Sample("vs", WEB, "", numbers, 0, 2)], 20.0)
    assert (row(account)["active"], row(account)["inactive"], row(account)["bytesOut"]) == (0, 2, 10)


def test_a_removed_endpoint_takes_nothing_from_a_port_with_counters_of_its_own() -> None:
    def samples(*endpoints: str) -> list:
        found = [Sample("server", WEB, "", (9, 9, 9, 9, 9))]
        for name in endpoints:
            found += [Sample(name, WEB, name, (4, 4, 4, 4, 4)), Sample(name, WEB, "", UNCOUNTED, 1, 0)]
        return found

    account = TrafficAccount()
    account.update([WEB], samples(A, B), 10.0)
    account.update([WEB], samples(A), 20.0)
    account.forget({A}, 25.0)
    account.update([WEB], samples(A), 30.0)
    assert (row(account)["connections"], row(account)["resetAt"], endpoints(account)) == (9, 0, {A: 8})
    assert row(account)["endpoints"][0]["resetAt"] == 25.0


@pytest.mark.parametrize(("count", "total", "reset_at"), [(7, 7, 0), (5, 5, 0), (2, 7, 15.0)])
def test_a_real_server_that_is_added_again_may_continue_to_count(
    monkeypatch: pytest.MonkeyPatch, count: int, total: int, reset_at: float
) -> None:
    server = RealServerKey(VirtualServerKey("tcp", "10.96.0.1", 80), "10.244.1.1", 80)
    new = server._replace(ip="10.244.1.2")
    account = TrafficAccount()
    account.update([WEB], [Sample(server, WEB, A, (5, 5, 5, 5, 5))], 10.0)
    asked = []

    def read(_sock: object, servers: set) -> dict:
        asked.extend(servers)
        return {server: RealServerStatistics(Statistics(*[count] * 5), 0, 0)}

    monkeypatch.setattr(f"{revived.__module__}.real_server_statistics", read)
    handles: Any = SimpleNamespace(ipvs=None)
    removed = [PlannedChange(_Table(Kind.REAL_SERVERS), Change(removed={server: RealServer(1)}))]
    account.forget(counters_reset(removed) - revived(removed, account, handles), 12.0)
    assert not asked
    added = [PlannedChange(_Table(Kind.REAL_SERVERS), Change(added={server: RealServer(1), new: RealServer(1)}))]
    account.forget(counters_reset(added) - revived(added, account, handles), 15.0)
    assert asked == [server.server]
    account.update([WEB], [Sample(server, WEB, A, (count,) * 5)], 20.0)
    assert endpoints(account) == {A: total}
    assert row(account)["endpoints"][0]["resetAt"] == reset_at


class _Table(Resource):
    def __init__(self, kind: str) -> None:
        self.kind, self.family = kind, "IPv4"


def reset(kind: str, change: Change) -> set:
    return counters_reset([PlannedChange(_Table(kind), change)])


def test_chains_that_are_written_count_from_zero() -> None:
    written, other = ChainKey("nat", "KUBE-SEP-A"), ChainKey("filter", "KUBE-FORWARD")
    assert reset(Kind.CHAINS, Change(replaced={written: ((), ("-j ACCEPT",)), other: ((), ())})) == {"KUBE-SEP-A"}


def test_ipvs_keeps_counters_of_what_is_edited() -> None:
    server = VirtualServerKey("tcp", "10.96.0.1", 80)
    one, two = (RealServerKey(server, ip, 80) for ip in ("10.244.1.1", "10.244.1.2"))
    three = RealServerKey(server, "10.244.1.3", 80)
    edited = {two: (RealServer(1), RealServer(0))}
    change = Change(added={one: RealServer(1)}, replaced=edited, removed={three: RealServer(1)})
    assert reset(Kind.REAL_SERVERS, change) == {one}
    assert reset(Kind.VIRTUAL_SERVERS, Change(removed={server: None})) == {server}


def test_only_the_elements_that_differ_count_from_zero() -> None:
    lists, frontend = ElementKey("list", "service-endpoints", b"k"), ElementKey("element", "service-frontends", b"k")
    change = Change(replaced={lists: ((b"a", b"b", b"c"), (b"a", b"x")), frontend: ("goto a", "goto b")})
    at = [CountedElement("service-endpoints", b"k" + index_bytes(index)) for index in range(3)]
    assert reset(Kind.TABLE_OBJECTS, change) == {at[1], at[2], CountedElement("service-frontends", b"k")}
    assert reset(Kind.TABLE_OBJECTS, Change(added={lists: (b"a",)})) == {at[0]}
    plain, counted = SetValue(("ipv4_addr",)), SetValue(("ipv4_addr",), counted=True)
    replaced = {ObjectKey("set", "service-frontends"): (plain, counted)}
    assert reset(Kind.TABLE_OBJECTS, Change(replaced=replaced)) == {CountedElement("service-frontends")}


def test_counters_of_iptables_are_parsed() -> None:
    text = """*nat
:KUBE-SVC-AAAA - [0:0]
[3:180] -A KUBE-SVC-AAAA -m comment --comment "shop/web -> 10.244.1.1:80" -m statistic --mode random -j KUBE-SEP-ONE
[4:240] -A KUBE-SVC-AAAA -j KUBE-SEP-TWO
[0:0] -A KUBE-SEP-ONE -s 10.244.1.1/32 -j KUBE-MARK-MASQ
[3:180] -A KUBE-SEP-ONE -p tcp -m comment --comment shop/web -m tcp -j DNAT --to-destination 10.244.1.1:80
[4:240] -A KUBE-SEP-TWO -p tcp -m tcp -j DNAT --to-destination [fd00::1]:80
COMMIT
"""
    found = parse_counters(text)
    assert found.reached == {"KUBE-SVC-AAAA": ["KUBE-SEP-ONE", "KUBE-SEP-TWO"]}
    assert found.endpoints == {
        "KUBE-SEP-ONE": EndpointChain("10.244.1.1:80", 3),
        "KUBE-SEP-TWO": EndpointChain("[fd00::1]:80", 4),
    }


def test_the_busiest_ports_have_metrics_and_keep_them() -> None:
    busiest = Busiest()
    ports = [ServicePortName("shop", f"s{number}", "", "TCP") for number in range(4)]
    counts = dict.fromkeys(ports, 0)
    assert busiest.choose(counts, 0.0, 2) == set(ports[:2])
    assert busiest.choose({**counts, ports[3]: 10}, 15.0, 2) == {ports[0], ports[3]}
    # A short burst of less does not displace what had more a moment before.
    assert busiest.choose({**counts, ports[3]: 10, ports[2]: 9, ports[1]: 8}, 15.0, 2) == {ports[2], ports[3]}
    later = {**counts, ports[3]: 10, ports[2]: 9, ports[1]: 18}
    assert busiest.choose(later, HALF_LIFE_SECONDS, 2) == {ports[1], ports[3]}
    assert busiest.choose(later, 15.0, 0) == set()


def test_metrics_have_the_numbers_that_the_mode_counts() -> None:
    pytest.importorskip("prometheus_client")
    ipvs = MeasuredPort("IPv4", WEB, (5, 1, 2, 3, 4), (7, 8))
    other = MeasuredPort("IPv6", DB, (6, None, None, None, None), (None, None))
    measured = [Measured()]
    metrics = Metrics()
    metrics.on_scrape(TRAFFIC, lambda: measured[0].values())
    prefix = "kubenode_proxy_service_"
    assert f"{prefix}connections" not in metrics.text().decode()
    measured[0] = Measured((ipvs, other), 3)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.startswith(prefix) and "annotations" not in sample.name
    }
    web = ("shop", "web", "http", "TCP", "IPv4")
    assert samples == {
        (f"{prefix}connections_total", *web): 5,
        (f"{prefix}connections_total", "shop", "db", "", "TCP", "IPv6"): 6,
        (f"{prefix}packets_total", *web, "in"): 1,
        (f"{prefix}packets_total", *web, "out"): 2,
        (f"{prefix}bytes_total", *web, "in"): 3,
        (f"{prefix}bytes_total", *web, "out"): 4,
        (f"{prefix}open_connections", *web, "active"): 7,
        (f"{prefix}open_connections", *web, "inactive"): 8,
        (f"{prefix}ports_without_metrics",): 3,
    }
