# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the weights of endpoints: which annotations apply, maintenance, and the shares that each mode renders."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.account import MOST_PLACES, PLACES_OF_ENDPOINT
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import Failing, NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import ServicePolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables import mode as iptables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import CHAINS
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs import mode as ipvs
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs import model
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables import mode as nftables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import RESOURCE
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace import mode as userspace
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.model import LISTENERS
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import Endpoint
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.weights import shares, slots
from tests.lab import manifests

WEIGHT, CILIUM = "kubenode.proxy/weight", "service.cilium.io/weight"
SETTINGS = DataplaneSettings(IPV4, "n1", "192.0.2.1", schedulers=frozenset(("wrr", "wlc")))
WEB = NamespacedName("default", "web")


#: Neither a weight nor a word of any annotation: other alphabets' digits, other notations, other types, huge values.
ODD = [
    *("-1", "+1", "257", "0257", "1.0", "1.5", "1e2", "0x10", "1_0", "1 0", "", " ", "x", "true", "null", "NaN", "1,2"),
    *("9" * 20, "9" * 5000, "\u0661", "\uff11", "\u00b2", "1\x00", "1\u200b", "\x1b[2J1", "1\n2"),
    *(3, 0, 1.0, 10**400, True, False, ["1"], {"1": 1}),
]


def annotated(name, **annotations):
    return {"name": name, "annotations": {key: value for key, value in annotations.items() if value is not None}}


def cluster(weights, nodes=None, cilium=None, **spec):
    """Return the state of a Service with one slice for each weight, whose endpoint 10.0.0.N is on node nN."""
    ports = [manifests.port(80)]
    objects = [manifests.service("web", "10.96.0.1", ports, **spec)]
    for number, weight in enumerate(weights, 1):
        item = manifests.endpoint_slice("web", [manifests.endpoint(f"10.0.0.{number}", f"n{number}")], ports)
        given = {WEIGHT: weight, CILIUM: (cilium or {}).get(number)}
        item["metadata"].update(annotated(f"web-{number}", **given))
        objects.append(item)
    for name, weight in (nodes or {}).items():
        node = manifests.node(name, "192.0.2.1", "10.0.0.0/24")
        node["metadata"].update(annotated(name, **{WEIGHT: weight}))
        objects.append(node)
    return ClusterState.from_objects([prune(item) for item in objects])


def port_of(state, policy=None):
    """Return the only ServicePort on node n1."""
    (info,) = all_service_ports(state, NodeContext(IPV4, "n1", policy=policy or ServicePolicySettings())).values()
    return info


def weights_of(endpoints):
    return [endpoint.weight for endpoint in endpoints]


def test_the_weight_is_that_of_the_slice_times_that_of_the_node():
    state = cluster(["3", None, "256"], nodes={"n1": "2", "n2": "5"})
    assert weights_of(port_of(state).endpoints) == [3, 1, 256]
    assert weights_of(port_of(state, ServicePolicySettings(node_weights=True)).endpoints) == [6, 5, 256]


def test_weights_of_cilium_are_relative_to_its_default():
    state = cluster([None, None, "7"], cilium={1: "50"})
    assert weights_of(port_of(state).endpoints) == [1, 1, 7]
    assert weights_of(port_of(state, ServicePolicySettings(aliases=True)).endpoints) == [50, 100, 7]


@pytest.mark.parametrize(
    "policy", [ServicePolicySettings(annotations_enabled=False), ServicePolicySettings(annotated_namespaces=("other",))]
)
def test_annotations_of_slices_can_be_switched_off(policy):
    assert weights_of(port_of(cluster(["0", "9"]), policy).cluster) == [1, 1]


@pytest.mark.parametrize("value", ODD)
def test_an_invalid_weight_is_named_and_the_default_is_used(value):
    state = cluster([value, "2"], nodes={"n2": value})
    assert weights_of(port_of(state, ServicePolicySettings(node_weights=True)).endpoints) == [1, 2]
    assert [str(part).partition("]: ")[0] for part in state.skipped] == [
        f"EndpointSlice default/web-1: metadata.annotations[{WEIGHT}",
        f"Node n2: metadata.annotations[{WEIGHT}",
    ]
    assert "n2" in state.nodes
    assert all(line.isprintable() and len(line) < 300 for line in map(str, state.skipped))


def test_a_weight_of_null_is_named_as_well():
    raw = manifests.endpoint_slice("web", [manifests.endpoint("10.0.0.1", "n1")], [manifests.port(80)])
    raw["metadata"]["annotations"] = {WEIGHT: None, CILIUM: None}
    state = ClusterState.from_objects([prune(raw)])
    assert [str(part).partition(": metadata.annotations")[2] for part in state.skipped] == [
        f"[{WEIGHT}]: null is not an integer from 0 to 256; the default is used",
        f"[{CILIUM}]: null is not an integer from 0 to 65535; the default is used",
    ]


@pytest.mark.parametrize("value", ["0", "1", "256", "007", " 3 ", "\t3\n"])
def test_valid_weights(value):
    assert weights_of(port_of(cluster([value])).endpoints) == [int(value)]
    assert cluster([value]).skipped == ()


def test_the_weight_of_a_node_concerns_the_services_with_endpoints_there():
    state = cluster([None, None], nodes={"n2": None})
    node = manifests.node("n2", "192.0.2.1", "10.0.0.0/24")
    assert state.upsert(node) == frozenset()
    node["metadata"]["annotations"] = {WEIGHT: "0"}
    assert state.upsert(node) == {WEB}
    assert state.upsert(node) == frozenset()
    assert state.delete(node) == {WEB}
    assert state.node_weights == {}


def test_an_endpoint_of_weight_0_is_selected_nowhere():
    info = port_of(cluster(["0", None], externalTrafficPolicy="Local", type="NodePort"))
    assert [endpoint.ip for endpoint in info.cluster] == ["10.0.0.2"]
    assert (info.local, info.has_any, len(info.endpoints)) == ((), True, 2)


def test_without_any_weight_there_is_no_endpoint():
    info = port_of(cluster(["0", "0"]))
    assert (info.cluster, info.reachable, info.has_any) == ((), (), False)


def test_an_endpoint_in_maintenance_does_not_count_for_the_panic_threshold():
    """The only endpoint that could get traffic fails, so too few pass; the one of weight 0 changes nothing."""
    state = cluster(["0", None])
    state.set_failing(WEB, Failing({("10.0.0.2", 80): "silent"}, panic_threshold=0.0))
    assert [endpoint.ip for endpoint in port_of(state).cluster] == ["10.0.0.2"]


# -- shares ------------------------------------------------------------------------------------------------------------


def with_weights(weights):
    return tuple(
        Endpoint(f"10.0.{index // 250}.{index % 250}", 80, weight=weight) for index, weight in enumerate(weights)
    )


@given(st.lists(st.integers(1, 65536), min_size=1, max_size=40))
def test_slots_are_in_proportion_and_bounded(weights):
    endpoints = with_weights(weights)
    places = slots(endpoints)
    counts = Counter(endpoint.ip for endpoint in places)
    most = max(MOST_PLACES, PLACES_OF_ENDPOINT * len(weights))
    assert len(counts) == len(weights) and len(places) <= most + len(weights)
    exact = sum(shares(endpoints)) <= most
    for endpoint in endpoints:
        wanted = Fraction(endpoint.weight, sum(weights))
        # A place that is rounded down, and the one that the smallest endpoints get nevertheless.
        allowed = 0 if exact else Fraction(1 + len(weights), len(places))
        assert abs(Fraction(counts[endpoint.ip], len(places)) - wanted) <= allowed


def test_turns_are_spread_evenly():
    assert "".join(endpoint.ip[-1] for endpoint in slots(with_weights([1, 3, 2]))) == "120121"


# -- modes -------------------------------------------------------------------------------------------------------------


def tables(rendering, info):
    return rendering.desired_tables({info.key: info}, SETTINGS)


def by_iptables(info):
    """Return the share of each endpoint, from the probabilities of the rules."""
    chains = tables(iptables.RENDERING, info)[CHAINS]
    (rules,) = [rules for key, rules in chains.items() if key.chain.startswith("KUBE-SVC-")]
    left, found = 1.0, {}
    for rule in rules:
        target = re.search(r"-> ([0-9.]+):80", rule)
        if target is None:
            continue
        chance = re.search(r"--probability ([0-9.]+)", rule)
        part = left * (float(chance.group(1)) if chance else 1.0)
        found[target.group(1)] = part
        left -= part
    return found


def by_ipvs(info):
    servers = tables(ipvs.RENDERING, info)[model.REAL_SERVERS]
    total = sum(value.weight for value in servers.values())
    return {key.ip: value.weight / total for key, value in servers.items() if value.weight}


def by_nftables(info):
    (places,) = [
        value for key, value in tables(nftables.RENDERING, info)[RESOURCE].items() if getattr(key, "kind", "") == "list"
    ]
    counts = Counter(".".join(map(str, place[:4])) for place in places)
    return {address: count / len(places) for address, count in counts.items()}


def by_userspace(info):
    (listener,) = tables(userspace.RENDERING, info)[LISTENERS].values()
    counts = Counter(address for address, _port in listener.endpoints)
    return {address: count / len(listener.endpoints) for address, count in counts.items()}


@pytest.mark.parametrize("shares_in", [by_iptables, by_ipvs, by_nftables, by_userspace])
@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (["1", "2", "5"], {1: 0.125, 2: 0.25, 3: 0.625}),
        (["0", "30", "10"], {2: 0.75, 3: 0.25}),
        (["4", "4", "0"], {1: 0.5, 2: 0.5}),
        (["256", "128", "128"], {1: 0.5, 2: 0.25, 3: 0.25}),
    ],
)
def test_every_mode_gives_endpoints_the_same_shares(shares_in, weights, expected):
    found = shares_in(port_of(cluster(weights)))
    assert found == pytest.approx({f"10.0.0.{number}": share for number, share in expected.items()}, abs=1e-9)


@pytest.mark.parametrize("shares_in", [by_iptables, by_ipvs, by_nftables, by_userspace])
def test_an_endpoint_in_slow_start_gets_a_part_of_its_share(shares_in):
    state = cluster(["2", "2", "0"])
    state.set_rising(WEB, {("10.0.0.2", 80): 2, ("10.0.0.3", 80): 1})
    assert shares_in(port_of(state)) == pytest.approx({"10.0.0.1": 0.8, "10.0.0.2": 0.2}, abs=1e-9)
    state.set_rising(WEB, {})
    assert port_of(state).weighted is False


@pytest.mark.parametrize("scheduler", ["mh", "sh"])
@pytest.mark.parametrize("rendering", [ipvs.RENDERING, nftables.RENDERING])
def test_where_clients_are_hashed_there_is_no_slow_start(rendering, scheduler):
    """Nodes see an endpoint at different times, and would send a client to different endpoints meanwhile."""
    settings = SETTINGS._replace(schedulers=SETTINGS.schedulers | {"mh", "sh", "jhash"})
    asked = {"kubenode.proxy/scheduler": scheduler, "kubenode.proxy/slow-start": "40s"}
    state = cluster(["2", "6"], metadata={"annotations": asked})

    def rendered():
        info = port_of(state)
        return rendering.desired_tables({info.key: info}, settings), list(rendering.ignored_annotation(info, settings))

    before, ignored = rendered()
    assert ignored == ["slow start is not used where a client's address determines its endpoint"]
    state.set_rising(WEB, {("10.0.0.2", 80): 1})
    assert rendered() == (before, ignored)
    state.set_rising(WEB, {("10.0.0.1", 80): 4, ("10.0.0.2", 80): 4})
    assert rendered() == (before, ignored)


def test_slow_start_counts_where_hashing_is_not_possible():
    asked = {"kubenode.proxy/scheduler": "mh", "kubenode.proxy/slow-start": "40s"}
    state = cluster(["1", "1"], metadata={"annotations": asked})
    state.set_rising(WEB, {("10.0.0.2", 80): 2})
    for shares_in in (by_iptables, by_ipvs, by_nftables, by_userspace):
        assert shares_in(port_of(state)) == pytest.approx({"10.0.0.1": 0.8, "10.0.0.2": 0.2}, abs=1e-9)


@pytest.mark.parametrize("rendering", [item.RENDERING for item in (iptables, ipvs, nftables, userspace)])
def test_equal_weights_change_nothing(rendering):
    weighted, plain = port_of(cluster(["7", "7", "7"])), port_of(cluster([None, None, None]))
    assert weighted.weighted is False
    assert tables(rendering, weighted) == tables(rendering, plain)


def test_in_ipvs_an_endpoint_in_maintenance_keeps_its_connections():
    info = port_of(cluster(["0", "3", "6"]))
    servers = tables(ipvs.RENDERING, info)[model.REAL_SERVERS]
    assert {key.ip: value.weight for key, value in servers.items()} == {"10.0.0.1": 0, "10.0.0.2": 1, "10.0.0.3": 2}


@pytest.mark.parametrize(
    ("default", "usable", "expected", "ignored"),
    [
        ("rr", {"wrr"}, "wrr", 0),
        ("rr", set(), "rr", 1),
        ("lc", {"wlc"}, "wlc", 0),
        ("wrr", set(), "wrr", 0),
        ("mh", set(), "mh", 0),
        ("dh", set(), "dh", 1),
    ],
)
def test_weights_need_a_scheduler_that_heeds_them(default, usable, expected, ignored):
    settings = SETTINGS._replace(scheduler=default, schedulers=frozenset(usable))
    info = port_of(cluster(["1", "2"]))
    (value,) = ipvs.RENDERING.desired_tables({info.key: info}, settings)[model.VIRTUAL_SERVERS].values()
    assert value.scheduler == expected
    assert len(ipvs.RENDERING.ignored_annotation(info, settings)) == ignored
    counterpart = {"rr": {"wrr"}, "lc": {"wlc"}}
    assert ipvs.RENDERING.requested_schedulers(info, settings) == counterpart.get(default, frozenset())


def test_with_affinity_nftables_draws_in_proportion():
    info = port_of(cluster(["1", "3"], sessionAffinity="ClientIP"))
    chains = tables(nftables.RENDERING, info)[RESOURCE]
    lines = [
        line
        for key, value in chains.items()
        for line in nftables.RENDERING.lines(IPV4, RESOURCE, key, value)
        if "numgen" in line or "goto endpoint" in line
    ]
    drawn = [line for line in lines if "goto endpoint" in line and "@affinity" not in line]
    assert Counter(re.search(r"10\.0\.0\.\d", line).group() for line in drawn) == {"10.0.0.1": 1, "10.0.0.2": 3}
