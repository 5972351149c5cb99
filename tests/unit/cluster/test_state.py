# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The index of the cluster: what changes with each object, and which Services are affected."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState

WEB = NamespacedName("shop", "web")
CART = NamespacedName("shop", "cart")


def service(name="web", port=80):
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": name},
        "spec": {"clusterIP": "10.96.0.1" if name == "web" else "10.96.0.2", "ports": [{"port": port}]},
    }


def endpoint_slice(name="web-1", owner="web", address="10.0.0.1"):
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"namespace": "shop", "name": name, "labels": {"kubernetes.io/service-name": owner}},
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 8080}],
        "endpoints": [{"addresses": [address]}],
    }


def content(state):
    return (state.services, state.slices, state.nodes, state.service_cidrs, state.refusals)


def test_upsert_returns_the_services_affected():
    state = ClusterState()
    assert state.upsert(service()) == {WEB}
    assert state.upsert(service()) == frozenset()
    assert state.upsert(service(port=81)) == {WEB}
    assert state.upsert(endpoint_slice()) == {WEB}
    assert state.upsert(endpoint_slice()) == frozenset()
    assert state.upsert(endpoint_slice(address="10.0.0.2")) == {WEB}
    assert [item.address for item in state.slices_of(WEB)["web-1"].endpoints] == ["10.0.0.2"]


def test_a_slice_that_moves_to_another_service_affects_both():
    state = ClusterState.from_objects([service(), service("cart"), endpoint_slice()])
    assert state.upsert(endpoint_slice(owner="cart")) == {WEB, CART}
    assert state.slices_of(WEB) == {} and list(state.slices_of(CART)) == ["web-1"]


def test_skipped_parts_are_forgotten_with_their_object():
    bad = {**endpoint_slice(), "endpoints": [{"addresses": ["x"]}, {"addresses": ["10.0.0.2"]}]}
    state = ClusterState.from_objects([service(), bad])
    assert [str(part) for part in state.skipped] == [
        'EndpointSlice shop/web-1: endpoints[0].addresses[0]: "x" is not an IP address'
    ]
    assert [item.address for item in state.slices_of(WEB)["web-1"].endpoints] == ["10.0.0.2"]
    assert state.refusals == () and state.kinds == {"Service", "EndpointSlice"}
    state.upsert(endpoint_slice())
    assert state.skipped == ()
    state.upsert(bad)
    state.delete(bad)
    assert state.skipped == ()


def test_the_invalid_parts_of_an_object_are_not_multiplied():
    web = service()
    # Each part takes two bytes of the object.
    web["metadata"]["annotations"] = {"kubenode.proxy/allowed-sources": "," * 999}
    addresses = [{"addresses": [f"x{number}"]} for number in range(900)]
    state = ClusterState.from_objects([web, {**endpoint_slice(), "endpoints": addresses}])
    for kind, first, others in (("Service", "metadata.annotations", 981), ("EndpointSlice", "endpoints[0]", 881)):
        parts = [part for part in state.skipped if part.kind == kind]
        assert len(parts) == 20 and parts[0].field.startswith(first)
        assert [part.reason.partition("; and ")[2] for part in parts if "; and " in part.reason] == [
            f"{others - 1} more parts of the object are invalid"
        ]


def test_deletes_of_the_known_and_the_unknown():
    state = ClusterState.from_objects([service(), endpoint_slice()])
    assert state.delete(endpoint_slice("other")) == frozenset()
    assert state.delete(endpoint_slice()) == {WEB}
    assert state.delete(service()) == {WEB}
    assert state.delete(service()) == frozenset()
    assert state.delete(None) == frozenset()
    assert content(state) == content(ClusterState())


def test_a_service_that_is_no_longer_served_is_removed():
    state = ClusterState.from_objects([service()])
    raw = service()
    raw["spec"]["clusterIP"] = "None"
    assert state.upsert(raw) == {WEB} and not state.services


def test_a_refused_version_replaces_the_valid_one_until_it_is_fixed():
    state = ClusterState.from_objects([service(), endpoint_slice()])
    assert state.upsert(service(port=0)) == {WEB}
    assert list(map(str, state.refusals)) == ["Service shop/web: spec.ports[0].port: 0 is not between 1 and 65535"]
    assert not state.services
    assert state.upsert(service()) == {WEB}
    assert state.refusals == ()
    state.upsert(service(port=0))
    state.delete(service())
    assert state.refusals == ()


def test_invalid_objects_do_not_affect_the_others():
    state = ClusterState.from_objects([3, {"kind": "Service"}, service(port=-1), service("cart"), {"kind": "Secret"}])
    assert list(state.services) == [CART]
    assert len(state.refusals) == 3


def test_nodes_and_service_cidrs():
    node = {"kind": "Node", "metadata": {"name": "node-a"}}
    cidrs = {
        "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"},
        "spec": {"cidrs": ["10.96.0.0/16", "fd00::/112"]},
    }
    state = ClusterState.from_objects([node, cidrs, {**cidrs, "metadata": {"name": "more"}}])
    assert list(state.nodes) == ["node-a"]
    assert state.service_cidr_list("IPv4") == ("10.96.0.0/16",)
    assert state.service_cidr_list("IPv6") == ("fd00::/112",)
    state.delete(node)
    assert not state.nodes


OBJECTS = st.one_of(
    st.builds(service, st.sampled_from(["web", "cart"]), st.sampled_from([0, 80, 81])),
    st.builds(
        endpoint_slice,
        st.sampled_from(["s1", "s2"]),
        st.sampled_from(["web", "cart", "", 'bad"']),
        st.sampled_from(["10.0.0.1", "10.0.0.2", "x"]),
    ),
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), OBJECTS), max_size=12))
def test_the_state_depends_only_on_the_last_version_of_each_object(steps):
    state = ClusterState()
    last = {}
    for keep, raw in steps:
        before = (dict(state.services), {key: dict(value) for key, value in state.slices.items()})
        affected = state.upsert(raw) if keep else state.delete(raw)
        key = (raw["kind"], raw["metadata"]["name"])
        last.pop(key, None)
        if keep:
            last[key] = raw
        after = (state.services, state.slices)
        differing = {name for old, new in zip(before, after) for name in {*old, *new} if old.get(name) != new.get(name)}
        assert affected == differing
    assert content(state) == content(ClusterState.from_objects(last.values()))


def test_an_object_of_an_unrelated_type_changes_nothing():
    """A Knative Service may have the namespace and name of an invalid Service."""
    unrelated = {**service(), "apiVersion": "serving.knative.dev/v1"}
    invalid = service(port=70000)
    for objects in ([invalid, unrelated], [unrelated, invalid]):
        assert len(ClusterState.from_objects(objects).refusals) == 1
