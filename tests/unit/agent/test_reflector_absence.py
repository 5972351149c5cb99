# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A collection is gone, with all its objects, only if the API server itself says that it does not have it."""

from __future__ import annotations

import io
import json
import urllib.parse

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.reflector import Reflector
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Backoff
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import CLUSTER_NETWORK_POLICIES
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.objects import ObjectKey
from tests.apiserver.discovery import discovery
from tests.apiserver.wire import Answer, Wire, failure, response
from tests.lab.clock import Clock
from tests.unit.agent.scripted_reflector import Quiet

PATHS = {each.path for each in CLUSTER_NETWORK_POLICIES.versions}
PATH = CLUSTER_NETWORK_POLICIES.path
VERSION = PATH.rpartition("/")[0]
GROUP = VERSION.split("/")[2]
KIND = CLUSTER_NETWORK_POLICIES.kind
POLICY = {"metadata": {"name": "deny-all", "resourceVersion": "5"}, "spec": {}}
#: The answer of kube-apiserver to a path of a group that it does not have, and of load balancers without a backend.
NO_PAGE = response(b"404 page not found\n", "404 Not Found", {"Content-Type": "text/plain"})
NOT_FOUND = failure(404, "NotFound")
REFUSALS = pytest.mark.parametrize("refusal", [NO_PAGE, NOT_FOUND], ids=["text", "Status"])
FORBIDDEN = failure(403, "Forbidden")


def document(value):
    return response(json.dumps(value).encode())


def policies(version=VERSION[6:]):
    body = {"kind": f"{KIND}List", "apiVersion": version, "metadata": {"resourceVersion": "5"}}
    return document({**body, "items": [POLICY]})


def served(*versions):
    """Return the answers of an API server that has policies in these versions."""
    answers = {"/apis": groups(PATHS)}
    for version in versions:
        answers["/apis"] = with_version(version)
        answers[f"/apis/{GROUP}/{version}"] = resources("clusternetworkpolicies", version=f"{GROUP}/{version}")
        answers[f"/apis/{GROUP}/{version}/clusternetworkpolicies"] = policies(f"{GROUP}/{version}")
    return answers


def groups(absent=PATHS):
    return document(discovery("/apis", set(absent)))


def with_version(version):
    """Return the document of groups with another version of the group."""
    found = discovery("/apis", PATHS)
    group = {"name": GROUP, "versions": [{"groupVersion": f"{GROUP}/{version}"}]}
    return document({**found, "groups": [*found["groups"], group]})


def resources(*names, version=VERSION[6:]):
    items = [{"name": name} for name in names]
    return document({"kind": "APIResourceList", "groupVersion": version, "resources": items})


ALL, NEWEST = groups(absent=()), groups(absent=PATHS - {PATH})
#: What is in front of the API servers answers 404 to everything, or to some requests; or answers are invalid.
NO_PROOF = {
    "no API server": {},
    "a page of another server": {VERSION: response(b"<html></html>"), "/apis": response(b"<html></html>")},
    "no groups": {"/apis": document({"kind": "APIGroupList", "groups": []})},
    "another document of groups": {"/apis": document({"kind": "List", "groups": [{"versions": []}]})},
    "invalid groups": {"/apis": document({"kind": "APIGroupList", "groups": ["policy.networking.k8s.io"]})},
    "invalid versions": {"/apis": document({"kind": "APIGroupList", "groups": [{"name": "apps"}]})},
    "the version is listed": {"/apis": ALL},
    "the resource is listed": {
        "/apis": ALL,
        VERSION: resources("clusternetworkpolicies", "clusternetworkpolicies/status"),
    },
    "another document of resources": {"/apis": ALL, VERSION: document({"kind": "List", "resources": []})},
    "the resources of another version": {
        "/apis": ALL,
        VERSION: document({"kind": "APIResourceList", "groupVersion": "apps/v1", "resources": []}),
    },
    "no resources": {
        "/apis": ALL,
        VERSION: document({"kind": "APIResourceList", "groupVersion": VERSION[6:], "resources": None}),
    },
    "an overloaded server": {"/apis": ALL, VERSION: failure(503, "ServiceUnavailable")},
    "documents that may not be read": {VERSION: FORBIDDEN, "/apis": FORBIDDEN},
    "groups that may not be read": {"/apis": FORBIDDEN},
    "only a version that is not known has it": {
        "/apis": with_version("v9"),
        f"/apis/{GROUP}/v9": resources("clusternetworkpolicies", version=f"{GROUP}/v9"),
    },
    "another version that cannot be read": {"/apis": with_version("v9")},
}
PROOF = {
    "the version is not listed": {"/apis": groups()},
    "the resource is not listed": {"/apis": NEWEST, VERSION: resources("clusternetworkpolicies/status", "others")},
    "the version has no resources": {"/apis": NEWEST, VERSION: resources()},
    "another version does not have it": {
        "/apis": with_version("v1alpha1"),
        f"/apis/{GROUP}/v1alpha1": resources("adminnetworkpolicies", version=f"{GROUP}/v1alpha1"),
    },
}


class Follower:
    """A reflector of ClusterNetworkPolicies. ``answers``: what each path is answered with, by default NO_PAGE."""

    def __init__(self):
        self.clock = Clock()
        self.log = io.StringIO()
        self.batches, self.rests = [], []
        self.answers = {}
        self.wire = Wire(self.clock, self.answer)
        self.reflector = Reflector(
            CLUSTER_NETWORK_POLICIES,
            lambda expect: ApiClient(
                ApiConnection(host="http://api.example"), sleep=self.clock.wait, dial=self.wire.dial, clock=self.clock
            ),
            self.batches.append,
            Log(self.log),
            optional=True,
            backoff=lambda: Backoff(lambda: 0.5),
            clock=self.clock,
            wait=self.rest,
        )
        self.left = 0

    def answer(self, target):
        return Answer(self.answers.get(urllib.parse.urlsplit(target).path, NO_PAGE))

    def rest(self, seconds):
        self.rests.append(seconds)
        self.clock.wait(seconds)
        self.left -= 1
        if self.left <= 0:
            self.reflector._ending.set()

    def go(self, pauses):
        """Run until the reflector has made this number of pauses; return what it has delivered."""
        self.left = pauses
        self.batches.clear()
        self.rests.clear()
        self.reflector._ending.clear()
        self.reflector.run(Quiet())
        return [
            ([item["metadata"]["name"] for item in batch.changed], [item["metadata"]["name"] for item in batch.gone])
            for batch in self.batches
        ]


@pytest.fixture
def follower():
    """Return a follower that has listed a policy."""
    made = Follower()
    made.answers = {PATH: policies()}
    # The answer to the watch is not one of a watch.
    assert made.go(1) == [(["deny-all"], [])]
    return made


@REFUSALS
@pytest.mark.parametrize("answers", NO_PROOF.values(), ids=NO_PROOF)
def test_known_objects_stay_without_proof(follower, answers, refusal):
    present = follower.answers
    follower.answers = {PATH: refusal, **answers}
    assert follower.go(4) == []
    assert not follower.reflector.connected and follower.reflector.error
    assert max(follower.rests) < 60 and follower.reflector.lost_for > 0
    assert "level=warning" in follower.log.getvalue()
    follower.answers = present
    assert follower.go(1) == [([], [])]


@REFUSALS
@pytest.mark.parametrize("answers", PROOF.values(), ids=PROOF)
def test_known_objects_go_with_the_collection(follower, answers, refusal):
    follower.answers = {PATH: refusal, **answers}
    assert follower.go(2) == [([], ["deny-all"])]
    assert follower.reflector.error == "" and follower.rests[-1] == 300


@pytest.mark.parametrize("assumed", [False, True])
@REFUSALS
@pytest.mark.parametrize("answers", PROOF.values(), ids=PROOF)
def test_the_first_list_of_an_absent_collection_is_empty(answers, refusal, assumed):
    follower = Follower()
    follower.answers = {PATH: refusal, **answers}
    if assumed:
        follower.reflector.known.assume([ObjectKey(KIND, "", "on-disk")])
    assert follower.go(1) == [([], ["on-disk"] if assumed else [])]
    assert follower.batches[0].listed and follower.reflector.error == "" and follower.log.getvalue() == ""


@pytest.mark.parametrize("answers", NO_PROOF.values(), ids=NO_PROOF)
def test_the_first_list_is_tried_again_without_proof(answers):
    follower = Follower()
    follower.answers = answers
    assert follower.go(3) == []
    assert follower.reflector.error and max(follower.rests) < 60


@pytest.mark.parametrize(("assumed", "delivered"), [(False, [([], [])]), (True, [])])
def test_an_api_server_that_shows_no_documents_is_believed_if_nothing_is_lost_by_it(assumed, delivered):
    follower = Follower()
    follower.answers = {PATH: NOT_FOUND, VERSION: FORBIDDEN, "/apis": FORBIDDEN}
    if assumed:
        follower.reflector.known.assume([ObjectKey(KIND, "", "on-disk")])
    assert follower.go(1) == delivered


def test_a_collection_that_is_created_later_is_listed():
    follower = Follower()
    follower.answers = {"/apis": groups()}
    assert follower.go(2) == [([], []), ([], [])]
    follower.answers = {PATH: policies()}
    assert follower.go(1) == [(["deny-all"], [])]


def test_policies_are_followed_from_one_known_version_to_the_next():
    follower = Follower()
    follower.answers = served("v1alpha2")
    assert follower.go(1) == [(["deny-all"], [])]
    for version in ("v1beta1", "v1alpha2"):
        follower.answers = served(version)
        # The watch ends first.
        assert follower.go(2)[0] == (["deny-all"], [])
        assert follower.log.getvalue().count(f"are read in version {GROUP}/{version}") == 1 + (version == "v1alpha2")


def test_policies_of_no_known_version_stay_and_are_named():
    follower = Follower()
    follower.answers = served("v1beta1")
    assert follower.go(1) == [(["deny-all"], [])]
    follower.answers = served("v9")
    assert follower.go(3) == [] and follower.reflector.is_unserved and not follower.reflector.connected
    assert follower.reflector.error.endswith(
        f"it has them in version {GROUP}/v9, not in {GROUP}/v1beta1 or {GROUP}/v1alpha2"
    )
    follower.answers = served("v1alpha2")
    assert follower.go(1) == [(["deny-all"], [])] and not follower.reflector.is_unserved
