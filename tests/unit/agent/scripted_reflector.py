# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A reflector against scripted answers, with injected time, and what an API server answers."""

from __future__ import annotations

import io
import json
import urllib.parse

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.reflector import Reflector
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Backoff
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import SERVICES
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from tests.apiserver.wire import Answer, Wire, chunked, response
from tests.lab.clock import Clock

HOST = "http://api.example"


class Quiet:
    """A stand-in for the supervised thread."""

    def busy(self, seconds):
        """Ignore deadlines, which these tests do not check."""

    def idle(self):
        """Ignore idleness as well."""


def service(name, version="5", **metadata):
    return {
        "metadata": {"namespace": "default", "name": name, "resourceVersion": version, **metadata},
        "spec": {"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ports": [{"port": 80}]},
    }


def page(items=(), version="10", **metadata):
    body = {"kind": "ServiceList", "apiVersion": "v1", "metadata": {"resourceVersion": version, **metadata}}
    return response(json.dumps({**body, "items": list(items)}).encode())


def events(*items):
    return chunked(item if isinstance(item, bytes) else json.dumps(item).encode() + b"\n" for item in items)


def event(kind, item):
    return {"type": kind, "object": {"kind": "Service", "apiVersion": "v1", **item}}


def bookmark(version):
    return {"type": "BOOKMARK", "object": {"kind": "Service", "metadata": {"resourceVersion": version}}}


def query_of(target):
    return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(target).query))


class Run:
    """A reflector against scripted answers, until a number of seconds or requests has passed."""

    def __init__(self, list_answer, watch_answer):
        self.clock = Clock()
        self.end = self.clock.now
        self.stream = io.StringIO()
        self.view = ClusterView()
        self.lists, self.watches = [], []
        self.limit = 3000
        self._list, self._watch = list_answer, watch_answer
        self.wire = Wire(self.clock, self.answer)
        connection = ApiConnection(host=HOST)
        self.reflector = Reflector(
            SERVICES,
            lambda expect: ApiClient(
                connection, sleep=self.clock.wait, expect=expect, dial=self.wire.dial, clock=self.clock
            ),
            self.view.apply,
            Log(self.stream),
            reduce=prune,
            backoff=lambda: Backoff(lambda: 0.5),
            clock=self.clock,
            wait=self.wait,
        )

    def answer(self, target):
        query = query_of(target)
        watch = query.get("watch") == "true"
        (self.watches if watch else self.lists).append(self.clock.now)
        if self.clock.now >= self.end:
            self.reflector._ending.set()
        made = len(self.lists) + len(self.watches)
        assert made < self.limit, "too many requests"
        found = (self._watch if watch else self._list)(query)
        return found if isinstance(found, Answer) else Answer(*(found if isinstance(found, list) else [found]))

    def wait(self, seconds):
        self.clock.wait(seconds)
        if self.clock.now >= self.end:
            self.reflector._ending.set()

    def go(self, seconds=600.0):
        self.end = self.clock.now + seconds
        self.reflector.run(Quiet())
        return self

    @property
    def names(self):
        return sorted(key.name for key in self.view.state.services)

    @property
    def log(self):
        return self.stream.getvalue()
