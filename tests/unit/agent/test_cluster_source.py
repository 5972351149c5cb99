# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's source of the cluster state: which lists it awaits, for how long, and what the copy on disk provides."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source import cluster_source, disk_copy
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.first_services import FirstObjects
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Batch
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import NETWORK_POLICIES, PODS
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.cache import read_cache, write_cache
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from tests.unit.agent.source_bench import KINDS, NODE, POD, SERVICE, Bench, names, saved


@pytest.fixture
def cache(tmp_path):
    path = tmp_path / "cluster.json.gz"
    kept = {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "d", "name": "kept"}, "spec": {}}
    write_cache(str(path), [json.dumps(kept).encode()], set(KINDS))
    return path


def test_each_collection_and_the_copy_on_disk_have_a_thread():
    bench = Bench()
    bench.source.start("n1", serving=True)
    watches = [f"watch-{name}" for name in ("endpointslices", "nodes", "servicecidrs", "services")]
    assert sorted(bench.started) == ["cache", *watches]
    assert not bench.source.connected


def test_on_a_node_that_serves_nothing_the_first_services_are_read_before_the_collections():
    bench = Bench()
    bench.source.start("n1", serving=False)
    assert bench.started == ["cache", "watch-services"]
    bench.source.follow_all()
    bench.source.follow_all()
    assert sorted(bench.started[2:]) == ["watch-endpointslices", "watch-nodes", "watch-servicecidrs"]


@pytest.mark.parametrize("all_nodes", [False, True])
def test_a_new_version_of_a_held_object_adds_only_its_growth_in_each_collection(all_nodes):
    bench = Bench()
    bench.source.start("n1", serving=True, all_nodes=all_nodes)
    for reflector in bench.source.reflectors:
        kind = reflector.resource.kind
        old, new = ({"kind": kind, "metadata": {"name": "n1", "resourceVersion": version}} for version in ("5", "6"))
        bench.source.view.apply(Batch(kind, [prune(old)], []))
        assert reflector._listed(new).growth == 0, kind


def test_all_kinds_have_to_be_listed():
    bench = Bench()
    bench.list(*KINDS[:3])
    assert not bench.source.listed
    bench.list(KINDS[3])
    assert bench.source.listed


@pytest.mark.parametrize("required", [False, True])
def test_services_do_not_wait_for_long_for_a_node_that_is_not_needed(required):
    bench = Bench(node_required=required)
    bench.list("Service", "EndpointSlice")
    bench.now += cluster_source.NODE_PATIENCE_SECONDS - 1
    assert not bench.source.listed
    bench.now += 2
    assert bench.source.listed is not required


def test_without_a_copy_on_disk_nothing_ends_the_wait(tmp_path):
    bench = Bench(tmp_path / "absent.json.gz")
    bench.source.start("n1", serving=False)
    assert bench.source.patience_ends() is None


@pytest.mark.parametrize(
    ("serving", "seconds"),
    [(False, cluster_source.API_PATIENCE_SECONDS), (True, cluster_source.SERVING_PATIENCE_SECONDS)],
)
def test_patience_counts_from_the_first_request(cache, serving, seconds):
    bench = Bench(cache)
    bench.source.start("n1", serving)
    assert bench.source.patience_ends() == 1000.0 + cluster_source.ASKING_PATIENCE_SECONDS
    bench.now += 13
    bench.source.reflectors[2].requested_at = bench.now
    assert bench.source.patience_ends() == bench.now + seconds
    bench.list("Service")
    assert bench.source.patience_ends() == bench.now + cluster_source.PARTIAL_PATIENCE_SECONDS


def test_the_copy_on_disk_provides_only_kinds_the_server_has_not_listed(cache):
    bench = Bench(cache)
    bench.source.start("n1", serving=False)
    assert bench.source.use_cache()
    assert bench.source.from_cache
    assert bench.source.view.revision == 1
    bench = Bench(cache)
    bench.source.start("n1", serving=False)
    bench.list("Service")
    bench.source.use_cache()
    assert bench.source.view.revision == 0
    assert "starting from the cluster state kept on disk" in bench.text.getvalue()


def test_a_request_that_fails_ends_the_patience_of_a_node_that_serves_nothing(cache):
    """Only a request without an answer is awaited. While the kernel serves, a failure is awaited as well."""
    bench = Bench(cache)
    bench.source.start("n1", serving=False)
    services = bench.reflector("Service")
    services.requested_at, services.error = bench.now, "cannot be reached"
    assert bench.source.patience_ends() == bench.now
    services.error, bench.reflector("Node").error = "", "not allowed"
    assert bench.source.patience_ends() == bench.now + cluster_source.API_PATIENCE_SECONDS
    bench = Bench(cache)
    bench.source.start("n1", serving=True)
    services = bench.reflector("Service")
    services.requested_at, services.error = bench.now, "cannot be reached"
    assert bench.source.patience_ends() == bench.now + cluster_source.SERVING_PATIENCE_SECONDS


def named(namespace, name, **labels):
    kind = "EndpointSlice" if labels else "Service"
    metadata = {"namespace": namespace, "name": name, "labels": {"kubernetes.io/service-name": labels.get("of", "")}}
    return {"kind": kind, "metadata": metadata, "spec": {}, "addressType": "IPv4", "endpoints": []}


def test_a_server_that_has_sent_the_first_services_gets_time_for_the_lists_unless_it_fails(cache):
    bench = Bench(cache)
    bench.source.start("n1", serving=False)
    bench.reflector("Service").requested_at = bench.now
    bench.source.keep_first(FirstObjects((Batch("Service", [named("default", "kubernetes")], []),)))
    bench.source.follow_all()
    assert bench.source.patience_ends() == bench.now + cluster_source.PARTIAL_PATIENCE_SECONDS
    bench.reflector("EndpointSlice").error = "cannot be reached"
    assert bench.source.patience_ends() == bench.now


def test_the_first_services_replace_those_of_the_copy_on_disk(tmp_path):
    kept = [
        named("default", "kubernetes"),
        named("kube-system", "coredns"),
        named("kube-system", "old", of="coredns"),
        named("default", "old", of="kubernetes"),
        named("default", "other"),
        named("default", "other-1", of="other"),
    ]
    write_cache(str(tmp_path / "kept"), [json.dumps(item).encode() for item in kept], set(KINDS))
    bench = Bench(tmp_path / "kept")
    bench.source.start("n1", serving=False)
    batches = (
        Batch("Node", [NODE], []),
        Batch("Service", [named("default", "kubernetes")], []),
        Batch("EndpointSlice", [named("default", "new", of="kubernetes")], []),
    )
    bench.source.keep_first(FirstObjects(batches))
    bench.source.use_cache()
    view = bench.source.view
    assert sorted(names(view, "Service")) == [("default", "kubernetes"), ("default", "other")]
    assert sorted(names(view, "EndpointSlice")) == [("default", "new"), ("default", "other-1")]
    assert set(view.state.nodes) == {"n1"} and not view.listed
    # What the lists lack is removed, whether it came from the disk or from the server.
    view.pop_dirty()
    known = bench.reflector("EndpointSlice").known
    view.apply(known.replace([known.listed(named("default", "newer", of="kubernetes"))]))
    assert names(view, "EndpointSlice") == [("default", "newer")]
    assert view.pop_dirty() == {NamespacedName("default", name) for name in ("kubernetes", "other")}
    # From then on the lists have only what has changed.
    view.apply(known.replace([known.listed(named("default", "newer", of="kubernetes"))]))
    assert names(view, "EndpointSlice") == [("default", "newer")]


def test_what_is_read_after_the_copy_on_disk_was_used_is_not_kept(cache):
    bench = Bench(cache)
    bench.source.start("n1", serving=False)
    bench.source.use_cache()
    bench.source.keep_first(FirstObjects((Batch("Service", [named("default", "kubernetes")], []),)))
    assert names(bench.source.view, "Service") == [("d", "kept")]


def test_a_list_that_arrives_while_the_copy_on_disk_is_used_replaces_it(cache):
    """The reflector, a thread of its own, has compared the list with what it knew before."""
    bench = Bench(cache)
    bench.source.start("n1", serving=False)
    late = bench.reflector("Service").known.replace([])
    bench.source.use_cache()
    assert names(bench.source.view, "Service") == [("d", "kept")]
    bench.source.view.apply(late)
    assert names(bench.source.view, "Service") == []


def test_a_copy_that_was_damaged_since_the_start_is_not_used(cache):
    bench = Bench(cache)
    bench.source.start("n1", serving=False)
    cache.write_bytes(cache.read_bytes()[:-1])
    assert not bench.source.use_cache() and not bench.source.from_cache
    assert bench.source.patience_ends() is None and bench.started == ["cache", "watch-services"]
    assert "no cluster state to start from" in bench.text.getvalue()


def test_a_copy_without_room_is_not_used(cache):
    bench = Bench(cache)
    bench.source._room = SimpleNamespace(carries=lambda more, reserve: False)
    bench.source.start("n1", serving=False)
    assert not bench.source.use_cache() and names(bench.source.view, "Service") == []
    assert "it does not fit into the memory limit" in bench.text.getvalue()


def test_another_node_is_read_at_once_and_followed_instead():
    bench = Bench()
    bench.source.start("n0", serving=True)
    bench.source.read_node("n1")
    assert set(bench.source.view.state.nodes) == {"n1"}
    first = bench.source.reflectors[0]
    bench.source.follow_node("n1", "n0")
    assert first not in bench.source.reflectors and len(bench.source.reflectors) == 4
    assert bench.started.count("watch-nodes") == 2


def test_all_nodes_are_followed_where_their_weights_count():
    bench = Bench()
    bench.source.start("n1", serving=False, all_nodes=True)
    others = [{**NODE, "metadata": {"name": name}} for name in ("n1", "n2")]
    bench.source.view.apply(Batch("Node", others, [], True))
    bench.source.follow_node("n1", "n1", all_nodes=False)
    assert set(bench.source.view.state.nodes) == {"n1", "n2"}
    known = bench.source.reflectors[-1].known
    bench.source.view.apply(known.replace([known.listed(NODE)]))
    assert set(bench.source.view.state.nodes) == {"n1"}
    selectors = []
    for every in (True, False):
        bench.source.follow_node("n1", "n1", all_nodes=every)
        selectors.append(bench.source.reflectors[-1]._field_selector)
    assert selectors == ["", "metadata.name=n1"]


def test_nothing_is_saved_before_the_cluster_is_known(cache):
    bench = Bench(cache)
    bench.source.start("n1", serving=False)
    bench.source.view.apply(Batch("Service", [SERVICE], []))
    assert bench.source.is_unsaved and not bench.source.save() and bench.source.is_unsaved
    bench.list(*KINDS)
    bench.source.view.apply(Batch("Service", [SERVICE], []))
    assert bench.source.save() and not bench.source.is_unsaved


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "from-disk"])
def test_objects_of_a_collection_that_is_not_followed_any_more_are_forgotten(listed):
    """Otherwise policies that are enabled again would be enforced as they were before, until their list arrives."""
    bench = Bench()
    view = bench.source.view
    bench.source.start("n1", serving=False, others=[NETWORK_POLICIES])
    policies = [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"namespace": "d", "name": name, "resourceVersion": "1"},
            "spec": {"podSelector": {}},
        }
        for name in ("deleted", "kept")
    ]
    view.apply(Batch("NetworkPolicy", policies, [], listed))
    if not listed:
        view.from_disk.add("NetworkPolicy")
    assert len(view.state.policy.policies) == 2 and bench.source.follows("NetworkPolicy")
    size = view.size
    bench.source.follow_others([])
    assert not bench.source.follows("NetworkPolicy") and view.size < size
    assert not view.state.policy.policies and "NetworkPolicy" not in view.listed | view.from_disk
    bench.source.follow_others([NETWORK_POLICIES])
    known = bench.source.reflectors[-1].known
    view.apply(known.replace([known.listed(policies[1])]))
    assert [key.name for key in view.state.policy.policies] == ["kept"]


def test_the_state_is_saved_once_the_disk_works_again(tmp_path):
    """Without a change of the cluster meanwhile; one line says what is wrong, however often it is tried."""
    folder = tmp_path / "state"
    folder.touch()
    bench = Bench(folder / "cache")
    bench.source.start("n1", serving=True, others=())
    bench.list(*KINDS)
    keeper = bench.source.disk_copy

    def write():
        assert bench.source.save()
        keeper._waiting.put(None)
        keeper.run(SimpleNamespace(idle=lambda: None, busy=lambda _seconds: None))
        return bench.source.is_unsaved

    assert write() and write()
    assert bench.text.getvalue().count("the cluster state cannot be saved") == 1
    folder.unlink()
    assert not write() and not bench.source.save()
    assert "the cluster state is saved again" in bench.text.getvalue()
    assert (folder / "cache").exists()


def pod(name, node, **spec):
    return {**POD, "metadata": {"namespace": "d", "name": name}, "spec": {"nodeName": node, **spec}}


def slice_of(endpoints):
    return {**named("d", "web-1", of="web"), "endpoints": endpoints, "ports": [{"port": 80, "protocol": "TCP"}]}


@pytest.mark.parametrize(("boot", "left"), [("first", {"own", "hosts", "other"}), ("next", {"hosts", "other"})])
def test_after_a_reboot_the_copy_lacks_the_pods_that_ran_on_the_node(tmp_path, monkeypatch, boot, left):
    """Their addresses are others by then, but those of pods in the host's network are not."""
    addresses = {"own": ("n1", "10.244.1.5"), "hosts": ("n1", "192.0.2.1"), "other": ("n2", "10.244.2.5")}
    node = {**NODE, "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}}
    endpoints = [{"nodeName": name, "addresses": [address]} for name, address in addresses.values()]
    pods = [pod("own", "n1"), pod("hosts", "n1", hostNetwork=True), pod("other", "n2")]
    monkeypatch.setattr(disk_copy, "boot_identity", lambda: "first")
    path = saved(tmp_path / "kept", node, slice_of(endpoints), *pods)
    monkeypatch.setattr(disk_copy, "boot_identity", lambda: boot)
    bench = Bench(path)
    bench.source.start("n1", serving=False, others=[PODS])
    assert bench.source.use_cache()
    view = bench.source.view
    (found,) = view.state.slices_of(NamespacedName("d", "web")).values()
    assert {each.address for each in found.endpoints} == {addresses[name][1] for name in left}
    assert {name for _namespace, name in names(view, "Pod")} == left
    # Kinds that the server has not listed since are written as they were read.
    bench.list(*KINDS)
    bench.source.stop()
    assert {item["metadata"]["name"] for item in read_cache(str(path)) if item["kind"] == "Pod"} == left
