# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The API servers that the agent may use, and the choice of another one when the one in use fails.

Candidates are the kubeconfig's server, those of the NodeProxyConfiguration, and those that the cluster itself names in
the EndpointSlice ``default/kubernetes``, which the API servers keep up to date (kube-apiserver, option
``--endpoint-reconciler-type``). All clients of the agent use the same server. The next one is chosen at random, so that
the agents of a cluster spread over the remaining servers, and each client waits for a random time before it connects.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ...addresses import address_and_port
from ...cluster.connection import ApiConnection
from ...cluster.model import EndpointSlice, NamespacedName
from ...cluster.state import ClusterState
from ..surface.log import Log

KUBECONFIG, CONFIGURATION, CLUSTER = "kubeconfig", "configuration", "cluster"
KUBERNETES = NamespacedName("default", "kubernetes")
#: The certificate of every API server has this name, and no kubelet's has it: a node that the cluster's data wrongly
#: names as an API server cannot impersonate one with the certificate of its kubelet.
SERVER_NAME = "kubernetes.default.svc"
#: Seconds for which a server that has failed is not chosen if there is another one.
_AVOID_SECONDS = 60.0
_MOST_SERVERS = 64


class Candidate(NamedTuple):
    """An API server. ``url``: empty for the kubeconfig's own. ``origin``: where it is named."""

    url: str
    origin: str

    def connection(self, kubeconfig: Optional[str]) -> ApiConnection:
        """Return how to connect to it with the credentials and the certificate authority of a kubeconfig."""
        if self.origin == KUBECONFIG:
            return ApiConnection(kubeconfig=kubeconfig)
        if self.origin == CONFIGURATION:
            return ApiConnection(kubeconfig=kubeconfig, host=self.url)
        return ApiConnection(kubeconfig=kubeconfig, host=self.url, validate_certs=True, server_name=SERVER_NAME)


def _url(host: str, port: int) -> str:
    return f"https://{address_and_port(host, port)}"


def configured_servers(servers: Sequence[Tuple[str, int]]) -> Tuple[Candidate, ...]:
    """Return the candidates of a configuration, given by host and port."""
    return tuple(Candidate(_url(host, port), CONFIGURATION) for host, port in servers)


def named_servers(found: EndpointSlice) -> Tuple[Candidate, ...]:
    """Return the candidates that the EndpointSlice ``default/kubernetes`` names."""
    port = next((item.port for item in found.ports if item.protocol == "TCP" and item.port), 0)
    addresses = [endpoint.address for endpoint in found.endpoints if endpoint.ready]
    return tuple(Candidate(_url(address, port), CLUSTER) for address in addresses[:_MOST_SERVERS] if port)


class ApiServers:
    """The candidates, and the one in use. May be called from any thread.

    ``choose`` picks one of several candidates; ``clock`` is monotonic, in seconds. ``changes``: how often another
    server was chosen.
    """

    def __init__(
        self,
        log: Log,
        *,
        choose: Callable[[Sequence[Candidate]], Candidate] = random.choice,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._choose = choose
        self._clock = clock
        self._lock = threading.Lock()
        self._own = Candidate("", KUBECONFIG)
        self._own_url = ""
        self._current = self._own
        self._worked = False
        self._configured: Tuple[Candidate, ...] = ()
        self._learned: Tuple[Candidate, ...] = ()
        self._slice: Optional[EndpointSlice] = None
        self._discover = True
        self._failures: Dict[Candidate, Tuple[float, str]] = {}
        self.changes = 0

    def configure(self, servers: Sequence[Tuple[str, int]], discover: bool) -> None:
        """Set the servers of the configuration (host and port), and whether those that the cluster names are used."""
        with self._lock:
            self._configured = configured_servers(servers)
            self._discover = discover

    def learn(self, state: ClusterState) -> None:
        """Learn the servers that the cluster names. An absent or empty slice changes nothing."""
        # Only the API servers write this slice: it exists already, so tenants cannot create it.
        found = state.slices_of(KUBERNETES).get(KUBERNETES.name)
        if found is None or found is self._slice:
            return
        self._slice = found
        named = named_servers(found)
        if not named:
            return
        with self._lock:
            self._learned = named
            known = {*self._candidates(), self._current}
            self._failures = {item: failure for item, failure in self._failures.items() if item in known}

    @property
    def several(self) -> bool:
        """Whether there is more than one server to choose from."""
        with self._lock:
            return len(self._candidates()) > 1

    def current(self) -> Candidate:
        """Return the server to use."""
        with self._lock:
            return self._current

    def opened(self, candidate: Candidate, url: str) -> None:
        """Record the URL of a client that was created for a candidate; the kubeconfig's is known only then."""
        if candidate == self._own:
            with self._lock:
                self._own_url = url

    def answered(self, candidate: Candidate) -> None:
        """Record that a server has answered."""
        with self._lock:
            if candidate == self._current:
                self._worked = True
                self._failures.pop(candidate, None)

    def failed(self, candidate: Candidate, reason: str) -> bool:
        """Use another server if the failed one is in use; return whether another one is in use now."""
        with self._lock:
            self._failures[candidate] = (self._clock(), reason)
            others = [item for item in self._candidates() if item != candidate]
            if candidate != self._current:
                return True
            if not others:
                return False
            worked, self._worked = self._worked, False
            self._current = self._next(others)
            self.changes += 1
            new = self._shown(self._current)
            old = self._shown(candidate)
        say = self._log.warning if worked else self._log.debug
        say("using another API server", server=new, failed=old, reason=reason)
        return True

    def status(self) -> List[Dict[str, Any]]:
        """Return the servers with their origin, whether each is in use, and its last failure ("" if it works)."""
        with self._lock:
            candidates = self._candidates()
            if self._current not in candidates:
                candidates.append(self._current)
            return [
                {
                    "server": self._shown(item),
                    "from": item.origin,
                    "inUse": item == self._current,
                    "lastError": self._failures.get(item, (0.0, ""))[1],
                }
                for item in candidates
            ]

    def count(self) -> int:
        """Return the number of servers that are known."""
        with self._lock:
            return len(self._candidates())

    def _shown(self, candidate: Candidate) -> str:
        return candidate.url or self._own_url or "that of the kubeconfig"

    def _candidates(self) -> List[Candidate]:
        """Return the candidates; of several with one URL the first, which keeps the names that its origin requires."""
        found: Dict[str, Candidate] = {self._own_url: self._own}
        for item in (*self._configured, *(self._learned if self._discover else ())):
            found.setdefault(item.url, item)
        return list(found.values())

    def _next(self, others: Sequence[Candidate]) -> Candidate:
        """Choose one that has not failed recently, or else the one whose failure is the oldest."""
        recent = self._clock() - _AVOID_SECONDS
        good = [item for item in others if self._failures.get(item, (recent, ""))[0] <= recent]
        return self._choose(good) if good else min(others, key=lambda item: self._failures[item][0])
