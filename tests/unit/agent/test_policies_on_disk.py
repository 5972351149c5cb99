# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the copy on disk provides for network policies, at boot and after a restart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source import cluster_source
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Batch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import by_kind
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import CLUSTER_NETWORK_POLICIES
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.cache import open_cache, read_cache
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.unit.agent.source_bench import (
    KINDS,
    NAMESPACE,
    NODE,
    POD,
    POLICIES,
    POLICY,
    POLICY_KINDS,
    SERVICE,
    Bench,
    kept_names,
    names,
    saved,
)


@pytest.mark.parametrize("policies", [(), (POLICY,)], ids=["none", "without-cluster-policies"])
def test_a_kind_without_any_object_is_known_from_the_copy_on_disk(tmp_path, policies):
    """Otherwise no policy is enforced after a boot without the API server if there is no ClusterNetworkPolicy."""
    bench = Bench(saved(tmp_path / "kept", SERVICE, POD, NAMESPACE, *policies))
    bench.source.start("n1", serving=False, others=POLICIES)
    assert bench.source.use_cache()
    assert bench.source.view.known >= set(POLICY_KINDS)
    assert len(bench.source.view.state.policy.policies) == len(policies)


def test_the_copy_on_disk_is_written_again_when_a_kind_without_objects_is_known(tmp_path):
    path = tmp_path / "kept"
    bench = Bench(path)
    bench.source.start("n1", serving=True, others=POLICIES)
    bench.list(*KINDS, *POLICY_KINDS[:3])
    assert bench.source.save() and not bench.source.is_unsaved
    bench.list("ClusterNetworkPolicy")
    assert bench.source.is_unsaved
    bench.source.disk_copy._writing = False
    bench.source.stop()
    assert open_cache(str(path)).kinds == {*KINDS, *POLICY_KINDS}


def test_what_is_not_followed_is_not_taken_from_the_copy_on_disk(tmp_path):
    """Nothing would ever update or remove it."""
    bench = Bench(saved(tmp_path / "kept", SERVICE, POD, NAMESPACE, POLICY))
    bench.source.start("n1", serving=False)
    assert bench.source.use_cache()
    assert names(bench.source.view, "Service") and not names(bench.source.view, "Pod")
    assert not bench.source.view.known & set(POLICY_KINDS)


def late(path, listed=("Pod",)):
    """Return a bench whose server has answered for Services, and for the policies only some kinds."""
    bench = Bench(path)
    bench.source.start("n1", serving=False, others=POLICIES)
    bench.source.follow_all()
    bench.list(*KINDS, *listed)
    for kind in POLICY_KINDS:
        bench.reflector(kind).requested_at = bench.now
    return bench


def test_policies_are_taken_from_the_copy_on_disk_if_the_server_is_late_with_them(tmp_path):
    bench = late(saved(tmp_path / "kept", SERVICE, POD, NAMESPACE, POLICY))
    needed = frozenset((*POLICY_KINDS, "Node"))
    bench.now += cluster_source.POLICY_PATIENCE_SECONDS - 0.1
    assert not bench.source.use_policies_if_late(needed) and not bench.source.view.from_disk
    bench.now += 0.2
    assert bench.source.use_policies_if_late(needed) and bench.source.view.known >= needed
    assert len(bench.source.view.state.policy.policies) == 1
    # What the server has listed is newer.
    assert names(bench.source.view, "Pod") == names(bench.source.view, "Service") == []
    assert "using pods and network policies kept on disk" in bench.text.getvalue() and not bench.source.from_cache
    known = bench.reflector("NetworkPolicy").known
    bench.source.view.apply(known.replace([]))
    assert not bench.source.view.state.policy.policies


def test_a_request_for_policies_that_fails_ends_the_patience(tmp_path):
    bench = late(saved(tmp_path / "kept", SERVICE, POD, NAMESPACE), ("Pod", "Namespace", "NetworkPolicy"))
    needed = frozenset(POLICY_KINDS)
    bench.reflector("Pod").error = "listed before"
    assert not bench.source.use_policies_if_late(needed)
    bench.reflector("ClusterNetworkPolicy").error = "not allowed"
    assert bench.source.use_policies_if_late(needed) and bench.source.view.known >= needed


def test_there_is_nothing_to_wait_for_once_policies_are_known_or_without_a_copy_on_disk(tmp_path):
    bench = late(saved(tmp_path / "kept", SERVICE, POD), POLICY_KINDS)
    assert bench.source.use_policies_if_late(frozenset(POLICY_KINDS)) and not bench.source.view.from_disk
    bench = late(tmp_path / "absent")
    assert bench.source.use_policies_if_late(frozenset(POLICY_KINDS)) and not bench.source.view.from_disk


@pytest.mark.parametrize("stopped", [True, False], ids=["stop", "save"])
def test_what_is_not_listed_yet_remains_in_the_copy_on_disk(tmp_path, stopped):
    """A list of Pods that fails must not cost the next boot its policies, nor keep Services from being saved."""
    path = saved(tmp_path / "kept", SERVICE, POD, NAMESPACE, POLICY)
    bench = Bench(path)
    bench.source.start("n1", serving=True, others=POLICIES)
    newer = {**SERVICE, "metadata": {"namespace": "d", "name": "newer"}}
    bench.source.view.apply(Batch("Service", [newer], [], True))
    bench.source.view.apply(Batch("Namespace", [], [], True))
    bench.list(*KINDS[1:])
    if stopped:
        bench.source.stop()
    else:
        assert bench.source.save()
        bench.source.disk_copy._waiting.put(None)
        bench.source.disk_copy.run(SimpleNamespace(idle=lambda: None, busy=lambda _seconds: None))
    assert kept_names(path) == {"Service": "newer", "Pod": "web", "NetworkPolicy": "kept"}
    assert open_cache(str(path)).kinds == {*KINDS, *POLICY_KINDS}


def test_nothing_is_carried_over_once_policies_are_disabled_or_if_the_copy_on_disk_is_damaged(tmp_path):
    path = saved(tmp_path / "kept", SERVICE, POD, NAMESPACE, POLICY)
    for others in ((), POLICIES):
        bench = Bench(path)
        bench.source.start("n1", serving=True, others=others)
        bench.list(*KINDS)
        bench.source.stop()
        assert kept_names(path) == {} and open_cache(str(path)).kinds == set(KINDS)
        path.write_bytes(b"damaged")


def test_the_node_that_was_read_replaces_the_one_that_is_carried_over(tmp_path):
    node = {**NODE, "spec": {"podCIDRs": ["10.1.0.0/24"]}}
    path = saved(tmp_path / "kept", node)
    bench = Bench(path)
    bench.source.start("n1", serving=True)
    bench.source.read_node("n1")
    bench.list("Service", "EndpointSlice", "ServiceCIDR")
    bench.now += cluster_source.NODE_PATIENCE_SECONDS + 1
    bench.source.stop()
    assert len(read_cache(str(path))) == 2
    bench = Bench(path)
    bench.source.start("n1", serving=False)
    assert bench.source.use_cache() and bench.source.view.state.nodes["n1"].pod_cidrs == ()


REFUSED = {**POLICY, "spec": {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}}}
CLUSTER_POLICY = {
    "apiVersion": "policy.networking.k8s.io/v1alpha2",
    "kind": "ClusterNetworkPolicy",
    "metadata": {"name": "kept"},
    "spec": {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}},
}
REFUSED_CLUSTER_POLICY = {**CLUSTER_POLICY, "spec": {"tier": "Nobody", "priority": 1, "subject": {"namespaces": {}}}}


@pytest.mark.parametrize(
    ("valid", "refused"),
    [(POLICY, REFUSED), (CLUSTER_POLICY, REFUSED_CLUSTER_POLICY)],
    ids=["policy", "cluster-policy"],
)
@pytest.mark.parametrize("running", [True, False], ids=["while-it-runs", "while-it-is-stopped"])
@pytest.mark.parametrize("from_disk", [True, False], ids=["disk", "server"])
def test_the_last_valid_version_of_a_policy_outlives_a_restart(tmp_path, valid, refused, running, from_disk):
    """Whether it was refused before the restart or after it, and whether the API server answers at the start or not."""
    path = saved(tmp_path / "kept", SERVICE, POD, NAMESPACE, valid)
    kind = valid["kind"]
    for _restart in range(2):
        bench = Bench(path)
        view, policy = bench.source.view, bench.source.view.state.policy
        bench.source.start("n1", serving=True, others=POLICIES)
        if from_disk:
            assert bench.source.use_cache() and (policy.policies or policy.cluster_policies)
        if running:
            first = bench.reflector(kind).known
            bench.source.apply(first.replace([first.listed(valid)]))
            bench.source.apply(first.put(refused))
        else:
            first = bench.reflector(kind).known
            bench.source.apply(first.replace([first.listed(refused)]))
        running = False
        assert (policy.policies or policy.cluster_policies) and by_kind(view.state.refusals)[kind] == 1
        bench.list(*KINDS, "Pod", "Namespace")
        bench.source.stop()
        (kept,) = [item for item in read_cache(str(path)) if item["kind"] == kind]
        assert kept["spec"] == valid["spec"]
    assert from_disk or "a policy is refused; its version on disk remains in force" in bench.text.getvalue()
    bench.source.apply(first.delete(refused))
    assert not policy.policies and not policy.cluster_policies and not names(view, kind)


@pytest.mark.parametrize("copy", [True, False], ids=["also-on-disk", "without-a-copy"])
def test_a_policy_that_was_never_valid_is_refused_after_a_restart(tmp_path, copy):
    path = saved(tmp_path / "kept", REFUSED) if copy else tmp_path / "absent"
    bench = Bench(path)
    bench.source.start("n1", serving=True, others=POLICIES)
    known = bench.reflector("NetworkPolicy").known
    bench.source.apply(known.replace([known.listed(REFUSED)]))
    assert (
        not bench.source.view.state.policy.policies and by_kind(bench.source.view.state.refusals)["NetworkPolicy"] == 1
    )
    assert "remains in force" not in bench.text.getvalue()
    bench.source.apply(known.put(POLICY))
    assert bench.source.view.state.policy.policies and not by_kind(bench.source.view.state.refusals)["NetworkPolicy"]


def test_a_policy_that_was_deleted_while_the_agent_was_stopped_is_not_restored(tmp_path):
    bench = Bench(saved(tmp_path / "kept", POLICY))
    bench.source.start("n1", serving=True, others=POLICIES)
    other = {**REFUSED, "metadata": {"namespace": "d", "name": "other"}}
    known = bench.reflector("NetworkPolicy").known
    bench.source.apply(known.replace([known.listed(other)]))
    assert not bench.source.view.state.policy.policies


class ServedBench(Bench):
    """A source that reads from an API server."""

    def connect(self, expect, timeout=5.0):
        return ApiClient(ApiConnection(host=self.server.url), timeout, expect=expect)


@pytest.mark.parametrize("proof", [True, False])
def test_policies_on_disk_go_with_their_collection_only_if_the_api_server_does_not_have_it(tmp_path, proof):
    bench = ServedBench(saved(tmp_path / "kept", SERVICE, POD, NAMESPACE, CLUSTER_POLICY))
    bench.server = server = ApiServer(Store(), None)
    if proof:
        server.absent |= {each.path for each in CLUSTER_NETWORK_POLICIES.versions}
    else:
        server.failing[CLUSTER_NETWORK_POLICIES.path] = 404
    bench.source.start("n1", serving=True, others=POLICIES)
    bench.list(*KINDS, *POLICY_KINDS[:3])
    reflector = bench.reflector("ClusterNetworkPolicy")
    reflector._first_pause, reflector._wait = 0.0, lambda _seconds: reflector._ending.set()
    reflector.run(SimpleNamespace(busy=lambda _seconds: None))
    server.close()
    for batch in bench.delivered:
        bench.source.apply(batch)
    assert bool(reflector.error) != proof
    assert bench.source.use_policies_if_late(frozenset(POLICY_KINDS))
    assert len(bench.source.view.state.policy.cluster_policies) == (0 if proof else 1)


@pytest.mark.parametrize("copied", [True, False])
def test_policies_of_no_known_version_do_not_keep_others_from_being_in_force(tmp_path, copied):
    """Those of the copy on disk are in force; without a copy the others alone are."""
    bench = Bench(saved(tmp_path / "kept", SERVICE, POD, NAMESPACE, CLUSTER_POLICY) if copied else "")
    bench.source.start("n1", serving=True, others=POLICIES)
    bench.list(*KINDS, *POLICY_KINDS[:3])
    assert bench.source.use_policies_if_late(frozenset(POLICY_KINDS)) is not copied
    assert "ClusterNetworkPolicy" not in bench.source.view.known
    reflector = bench.reflector("ClusterNetworkPolicy")
    reflector.error, reflector.is_unserved = "in version v9", True
    assert bench.source.unserved == "in version v9"
    assert bench.source.use_policies_if_late(frozenset(POLICY_KINDS))
    assert bench.source.view.known >= set(POLICY_KINDS)
    assert len(bench.source.view.state.policy.cluster_policies) == copied
