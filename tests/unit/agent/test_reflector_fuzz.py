# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A reflector against an API server that answers wrongly at random: it never ends, and always recovers.

The tests run the real code from the bytes on the wire to the cluster state, with injected time. In each round some
answers are wrong while the cluster changes; then the server behaves and the state must match it within two minutes.
"""

from __future__ import annotations

import copy
import io
import json
import random
import urllib.parse

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.reflector import Reflector
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Backoff
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import (
    ENDPOINT_SLICES,
    NODES,
    SERVICE_CIDRS,
    SERVICES,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from tests.apiserver.mutations import events_of, mutated, page_of
from tests.apiserver.store import Compacted, Store
from tests.apiserver.wire import Answer, Wire, chunked, failure, response
from tests.lab.clock import Clock

#: 40 campaigns of 2,600 wrong answers each are 104,000.
SHORT, LONG = (4, 700), (40, 2600)
BACK_WITHIN_SECONDS = 120.0


def make_object(kind, number, rng):
    metadata = {"name": f"o{number}", "labels": {}, "annotations": {}}
    if kind == "Node":
        spec = {"podCIDRs": [f"10.244.{rng.randrange(250)}.0/24"], "taints": []}
        status = {"addresses": [{"type": "InternalIP", "address": f"192.0.2.{rng.randrange(1, 250)}"}]}
        return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec, "status": status}
    if kind == "ServiceCIDR":
        spec = {"cidrs": [f"10.{rng.randrange(90, 120)}.0.0/16"]}
        return {"apiVersion": "networking.k8s.io/v1", "kind": kind, "metadata": metadata, "spec": spec}
    metadata["namespace"] = "default"
    if kind == "Service":
        address = f"10.96.{number}.{rng.randrange(1, 250)}"
        spec = {
            "type": "ClusterIP",
            "clusterIP": address,
            "clusterIPs": [address],
            "ipFamilies": ["IPv4"],
            "ports": [{"name": "p", "protocol": "TCP", "port": rng.randrange(1, 60000)}],
        }
        return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec}
    metadata["labels"]["kubernetes.io/service-name"] = f"o{number % 3}"
    metadata["annotations"]["endpoints.kubernetes.io/last-change-trigger-time"] = "2026-01-01T00:00:00.5Z"
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": kind,
        "metadata": metadata,
        "addressType": "IPv4",
        "ports": [{"name": "p", "protocol": "TCP", "port": 80}],
        "endpoints": [{"addresses": [f"10.244.1.{rng.randrange(1, 250)}"], "conditions": {"ready": True}}],
    }


class Campaign:
    """A reflector and a server that alternates between wrong and correct answers, until enough were wrong."""

    def __init__(self, resource, seed, most):
        self.rng = random.Random(seed)
        self.resource = resource
        self.most = most
        self.wrong = self.rounds = self.requests = 0
        self.sane_since = None
        self.lost = ""
        self.left = 5
        self.clock = Clock()
        self.view = ClusterView()
        self.log = io.StringIO()
        self.store = Store()
        self.change()
        wire = Wire(self.clock, self.answer)
        connection = ApiConnection(host="http://api.example")
        self.reflector = Reflector(
            resource,
            lambda expect: ApiClient(
                connection, sleep=self.clock.wait, expect=expect, dial=wire.dial, clock=self.clock
            ),
            self.view.apply,
            Log(self.log),
            optional=resource is SERVICE_CIDRS,
            reduce=prune,
            backoff=lambda: Backoff(self.rng.random),
            clock=self.clock,
            wait=self.clock.wait,
        )

    def busy(self, seconds):
        """Ignore the deadlines of the supervised thread, which this test does not check."""
        assert 0 <= seconds < 2000

    idle = None

    def change(self):
        """Change the cluster."""
        for _turn in range(self.rng.randint(1, 4)):
            number = self.rng.randrange(8)
            known = {item["metadata"]["name"] for item in self.store.list(self.resource.path)[0]}
            if f"o{number}" in known and self.rng.random() < 0.4:
                namespace = "default" if self.resource.kind in ("Service", "EndpointSlice") else ""
                self.store.delete(self.resource.kind, namespace, f"o{number}")
            else:
                self.store.put(make_object(self.resource.kind, number, self.rng))

    def become_sane(self):
        """Give every object a new version and drop the watch history, so that only a list shows the current objects."""
        for item in self.store.list(self.resource.path)[0]:
            self.store.put(copy.deepcopy(item))
        self.store.put(make_object(self.resource.kind, 0, self.rng))
        self.store.compact()
        self.sane_since = self.clock.now

    @property
    def has_recovered(self):
        truth = ClusterState.from_objects(prune(item) for item in self.store.list(self.resource.path)[0])
        state = self.view.state
        return (state.services, state.slices, state.nodes, state.service_cidrs, state.refusals) == (
            truth.services,
            truth.slices,
            truth.nodes,
            truth.service_cidrs,
            truth.refusals,
        )

    def answer(self, target):
        self.requests += 1
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(target).query))
        watch = query.get("watch") == "true"
        if self.sane_since is None:
            self.wrong += 1
            self.left -= 1
            if self.rng.random() < 0.3:
                self.change()
            path, version = self.resource.path, query.get("resourceVersion", "")
            found = mutated(page_of(self.store, path), events_of(self.store, path, version), watch, self.rng)
            if self.left <= 0:
                self.become_sane()
            return found
        if watch and self.has_recovered:
            self.rounds += 1
            self.sane_since = None
            self.left = self.rng.randint(1, 12)
            if self.wrong >= self.most:
                self.reflector._ending.set()
        elif self.clock.now - self.sane_since > BACK_WITHIN_SECONDS:
            self.lost = f"round {self.rounds} after {self.wrong} wrong answers: {self.reflector.error}"
            self.reflector._ending.set()
        return self.watch(query) if watch else self.list(query)

    def version(self, query):
        text = query.get("resourceVersion") or "0"
        return int(text) if text.isdecimal() and len(text) < 30 else None

    def list(self, query):
        asked = self.version(query)
        if query.get("continue") or asked is None:
            return Answer(failure(400, "BadRequest"))
        if asked > self.store.resource_version:
            return Answer(failure(504, "Timeout"))
        return Answer(response(json.dumps(page_of(self.store, self.resource.path)).encode()))

    def watch(self, query):
        asked = self.version(query)
        if asked is None:
            return Answer(failure(400, "BadRequest"))
        if asked > self.store.resource_version:
            return Answer(failure(504, "Timeout"))
        try:
            self.store.events(self.resource.path, asked)
        except Compacted:
            return Answer(failure(410))
        parts = chunked(
            json.dumps(event).encode() + b"\n" for event in events_of(self.store, self.resource.path, str(asked))
        )
        return Answer(*parts[:-1], 30.0, parts[-1])


def campaigns(shape, marks=()):
    resources = (SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS)
    count, answers = shape
    return [
        pytest.param(resources[number % 4], number, answers, id=f"{resources[number % 4].name}-{number}", marks=marks)
        for number in range(count)
    ]


@pytest.mark.parametrize(("resource", "seed", "answers"), [*campaigns(SHORT), *campaigns(LONG, pytest.mark.full)])
def test_the_reflector_recovers_from_any_answer(resource, seed, answers):
    campaign = Campaign(resource, f"{seed}/{answers}", answers)
    campaign.reflector.run(campaign)
    assert not campaign.lost
    assert campaign.wrong >= answers and campaign.rounds > answers / 20
    # On average, fewer than two requests a second, wrong answers included.
    assert campaign.requests / (campaign.clock.now - 1000.0) < 2.0
