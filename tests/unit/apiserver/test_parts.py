# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the parts of the test API server without HTTP: places, lists, watches and writes."""

from __future__ import annotations

from typing import Any, Optional

import pytest

from tests.apiserver.failures import Failure
from tests.apiserver.listing import decode_token, page, predicate
from tests.apiserver.places import Place, find, get, place_of
from tests.apiserver.store import KINDS, Object, Store
from tests.apiserver.watching import watch_events
from tests.apiserver.writes import patch, write

SERVICE, NODE = KINDS["/api/v1/services"], KINDS["/api/v1/nodes"]
POLICY = KINDS["/apis/networking.k8s.io/v1/networkpolicies"]
EVERYWHERE = Place(SERVICE, None, "")
PATHS = {
    "/api/v1/services": EVERYWHERE,
    "/api/v1/namespaces/shop/services": Place(SERVICE, "shop", ""),
    "/api/v1/namespaces/shop/services/web": Place(SERVICE, "shop", "web"),
    "/api/v1/nodes": Place(NODE, None, ""),
    "/api/v1/nodes/node-a": Place(NODE, None, "node-a"),
    "/api/v1/namespaces/shop": Place(KINDS["/api/v1/namespaces"], None, "shop"),
    "/apis/networking.k8s.io/v1/namespaces/shop/networkpolicies/deny": Place(POLICY, "shop", "deny"),
    "/api/v1/services/web": None,
    "/api/v1/namespaces/shop/nodes": None,
    "/api/v1/namespaces/shop/services/web/status": None,
    "/apis/discovery.k8s.io/v9/endpointslices": None,
    "/healthz": None,
}


def service(name: str, namespace: str = "shop", **metadata: str) -> Object:
    head = {"apiVersion": "v1", "kind": "Service"}
    return {**head, "metadata": {"name": name, "namespace": namespace, **metadata}, "spec": {}}


def names(items: list[Object]) -> list[str]:
    return [item["metadata"]["name"] for item in items]


@pytest.fixture
def store() -> Store:
    store = Store(100)
    store.replace_all([service("a"), service("b", "other"), service("b"), service("c")])
    return store


@pytest.mark.parametrize(("path", "place"), PATHS.items())
def test_a_path_names_an_object_or_a_collection(path: str, place: Optional[Place]) -> None:
    assert place_of(path) == place


def test_an_object_is_found_in_its_own_namespace(store: Store) -> None:
    assert get(store, Place(SERVICE, "other", "b"))["metadata"]["namespace"] == "other"
    assert find(store, Place(SERVICE, "other", "a")) is None
    assert find(store, Place(SERVICE, "shop", "")) is None, "a collection is no object"
    with pytest.raises(Failure, match='services "a" not found') as caught:
        get(store, Place(SERVICE, "other", "a"))
    assert (caught.value.code, caught.value.body["details"]) == (404, {"name": "a", "kind": "services"})
    with pytest.raises(Failure, match="could not find the requested resource"):
        get(store, None)


def test_pages_cover_a_namespace_at_one_version(store: Store) -> None:
    place = Place(SERVICE, "shop", "")
    query = {"limit": "2"}
    first = page(store, place, query, predicate(place, query))
    assert names(first["items"]) == ["a", "b"]
    assert first["metadata"]["remainingItemCount"] == 1
    assert decode_token(first["metadata"]["continue"]) == (104, "shop/b")
    store.put(service("d"))
    query["continue"] = first["metadata"]["continue"]
    second = page(store, place, query, predicate(place, query))
    assert names(second["items"]) == ["c"]
    assert second["metadata"] == {"resourceVersion": "104"}


@pytest.mark.parametrize("query", [{"fieldSelector": "spec.clusterIP!=None"}, {"fieldSelector": "nonsense"}])
def test_an_unsupported_field_selector_is_a_bad_request(query: dict[str, str]) -> None:
    with pytest.raises(Failure) as caught:
        predicate(EVERYWHERE, query, {"spec.clusterIP"})
    assert (caught.value.code, caught.value.body["reason"]) == (400, "BadRequest")


def watched(store: Store, query: dict[str, str], ended: list[bool]) -> list[tuple[str, Any]]:
    """Return the events of a watch of one namespace that ends once it has sent the existing events."""
    place = Place(SERVICE, "shop", "")
    events = watch_events(
        store, SERVICE, query, predicate(place, query), is_ended=lambda: ended[0], bookmark_seconds=60.0
    )
    return list(events)


def test_a_watch_that_is_ended_has_sent_the_events_of_its_namespace(store: Store) -> None:
    store.delete("Service", "other", "b")
    store.put(service("a", uid="1"))
    store.delete("Service", "shop", "c")
    found = watched(store, {"resourceVersion": "104"}, [True])
    assert [(kind, item["metadata"]["name"]) for kind, item in found] == [("MODIFIED", "a"), ("DELETED", "c")]


def test_a_watch_from_a_forgotten_version_is_one_error(store: Store) -> None:
    store.compact()
    ((kind, status),) = watched(store, {"resourceVersion": "101"}, [False])
    assert (kind, status["code"], status["reason"]) == ("ERROR", 410, "Expired")


def test_a_patch_has_preconditions_and_counts_generations(store: Store) -> None:
    place = Place(SERVICE, "shop", "a")
    assert patch(store, place, {"metadata": {"labels": {"x": "y"}}})["metadata"].get("generation") is None
    assert patch(store, place, {"spec": {"type": "NodePort"}})["metadata"]["generation"] == 2
    with pytest.raises(Failure) as caught:
        patch(store, place, {"metadata": {"resourceVersion": "101"}})
    assert caught.value.code == 409
    assert get(store, place)["spec"] == {"type": "NodePort"}


@pytest.mark.parametrize(
    ("method", "place", "body", "code"),
    [
        ("POST", Place(SERVICE, "shop", ""), service("a"), 409),
        ("PUT", Place(SERVICE, "shop", "x"), service("x"), 404),
        ("PUT", Place(SERVICE, "shop", "a"), service("a", resourceVersion="1"), 409),
        ("DELETE", Place(SERVICE, "other", "a"), {}, 404),
        ("POST", EVERYWHERE, service("x"), 405),
    ],
)
def test_a_refused_write_changes_nothing(store: Store, method: str, place: Place, body: Object, code: int) -> None:
    with pytest.raises(Failure) as caught:
        write(store, method, place, body)
    assert (caught.value.code, store.resource_version) == (code, 104)


def test_a_policy_is_written_in_its_namespace(store: Store) -> None:
    place = Place(POLICY, "shop", "")
    code, stored = write(store, "POST", place, {"metadata": {"name": "deny"}, "spec": {}})
    assert (code, stored["kind"], stored["metadata"]["namespace"]) == (201, "NetworkPolicy", "shop")
    assert get(store, place._replace(name="deny")) == stored
