# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The API servers that the agent may use, and the switch to another one when the current one fails.

All clients of the agent use the same server. The next one is chosen at random, so that the agents of a cluster spread
over the remaining servers, and each client waits for a random time before it connects.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Callable, Optional, Sequence

from ...base.errors import ProxyError
from ...cluster.api.access.abortable import AbortableClient, Connect, Expect
from ...cluster.api.access.names import addresses_of_name, is_name
from ...cluster.api.access.servers import KUBECONFIG, Candidate, configured_servers, named_servers
from ...cluster.api.connection import scheme_host_and_port
from ...cluster.api_addresses import KUBERNETES, NO_CLAIMS, claims_at
from ...cluster.claims import Claim
from ...cluster.model import EndpointSlice
from ...cluster.state import ClusterState
from ...convergence.runtime.agent_status import ServerStatus
from ..telemetry.log import Log
from ..threads.supervision import Task

#: Seconds for which a server that has failed is not chosen if there is another one.
_AVOID_SECONDS = 60.0
#: How many addresses of one name are kept: a resolver may return a different part of them each time.
_MOST_ADDRESSES = 16
#: As often as kubelet renews its Lease by default (nodeLeaseDurationSeconds / 4), each time up to a quarter later.
CHECK_SECONDS = 10.0
_JITTER = 0.25
#: The lifetime of many records of load balancers in the DNS.
NAMES_SECONDS = 60.0


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
        self._configured: tuple[Candidate, ...] = ()
        self._addresses: dict[str, tuple[str, ...]] = {}
        # Determined when they may change, and not each time that the loop wakes.
        self._claims: frozenset[Claim] = NO_CLAIMS
        self._learned: tuple[Candidate, ...] = ()
        self._slice: Optional[EndpointSlice] = None
        self._discover = True
        self._failures: dict[Candidate, tuple[float, str]] = {}
        self.changes = 0

    def configure(self, servers: Sequence[tuple[str, int]], discover: bool) -> None:
        """Set the servers of the configuration (host and port), and whether those that the cluster names are used."""
        with self._lock:
            self._configured = configured_servers(servers)
            self._discover = discover
            self._claim()

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

    def claims(self) -> frozenset[Claim]:
        """Return the addresses of the servers of the kubeconfig, if one was used, and of the configuration."""
        with self._lock:
            return self._claims

    def names(self) -> list[str]:
        """Return the hosts of these servers that are names."""
        with self._lock:
            return list(dict.fromkeys(host for host, _port in self._given() if is_name(host)))

    @property
    def unresolved(self) -> bool:
        """Whether one of these names has no address yet."""
        return any(name not in self._addresses for name in self.names())

    def named(self, name: str, addresses: Sequence[str]) -> bool:
        """Record the addresses of a name, beside those that it had before; return whether one of them is new."""
        with self._lock:
            before = self._addresses.get(name, ())
            if addresses:
                self._addresses[name] = tuple(dict.fromkeys([*addresses, *before]))[:_MOST_ADDRESSES]
                self._claim()
            return not set(addresses).issubset(before)

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
                self._claim()

    def answered(self, candidate: Candidate) -> None:
        """Record that a server has answered."""
        with self._lock:
            if candidate == self._current:
                self._worked = True
                self._failures.pop(candidate, None)

    def failed(self, candidate: Candidate, reason: str) -> bool:
        """Switch to another server if the failed one is in use; return whether a different server is in use now."""
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

    def status(self) -> list[ServerStatus]:
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

    def _claim(self) -> None:
        """Determine the claims again; the caller holds the lock."""
        self._claims = claims_at(
            (address, port) for host, port in self._given() for address in (host, *self._addresses.get(host, ()))
        )

    def _given(self) -> list[tuple[str, int]]:
        """Return host and port of the servers of the kubeconfig, if one was used, and of the configuration."""
        urls = [self._own_url, *(item.url for item in self._configured)]
        return [scheme_host_and_port(url)[1:] for url in urls if url]

    def _shown(self, candidate: Candidate) -> str:
        return candidate.url or self._own_url or "that of the kubeconfig"

    def _candidates(self) -> list[Candidate]:
        """Return the candidates; of several with one URL the first, which keeps the names that its origin requires."""
        found: dict[str, Candidate] = {self._own_url: self._own}
        for item in (*self._configured, *(self._learned if self._discover else ())):
            found.setdefault(item.url, item)
        return list(found.values())

    def _next(self, others: Sequence[Candidate]) -> Candidate:
        """Choose a server that has not failed recently, otherwise the one whose failure is the oldest."""
        recent = self._clock() - _AVOID_SECONDS
        good = [item for item in others if self._failures.get(item, (recent, ""))[0] <= recent]
        return self._choose(good) if good else min(others, key=lambda item: self._failures[item][0])


class ServerCheck:
    """Sends a small request at intervals while there are ``several`` servers; the body of a supervised thread.

    So the agent leaves a server that hangs with open connections, on which watches are silent for minutes.

    The clients that ``connect`` creates should wait ANSWER_SECONDS of :mod:`cluster.access.servers`. ``leave`` is
    called with the URL of a server that does not answer, after the client has reported it.
    """

    def __init__(self, connect: Connect, several: Callable[[], bool], leave: Callable[[str], None]) -> None:
        self._client = AbortableClient(connect)
        self._several = several
        self._leave = leave
        self._stop = threading.Event()

    def run(self, task: Task) -> None:
        """Check until :meth:`stop`."""
        while not self._stop.wait(CHECK_SECONDS * (1.0 + random.random() * _JITTER)):
            if self._several():
                self.check(task.busy)
            task.idle()

    def check(self, expect: Expect) -> None:
        """Check once, over a new connection, since an open one may use a path that has failed."""
        with contextlib.suppress(ProxyError), self._client.opened(expect) as client:
            # A kubeconfig that cannot be used is suppressed: the reflectors report it.
            try:
                client.ready()
            except ProxyError as error:
                if not self._stop.is_set() and client.report(error):
                    self._leave(client.host)

    def interrupt(self) -> None:
        """Abort a request that hangs; called from another thread."""
        self._client.interrupt()

    def stop(self) -> None:
        """End the thread soon."""
        self._stop.set()


class ServerNames:
    """Resolves the names of ``servers`` at intervals, and a new one at once; the body of a supervised thread.

    So no Service can replace their addresses. A resolver that does not answer blocks its caller for seconds.

    ``changed`` is called, from this thread, when a name has a new address. ``resolve`` replaces the node's resolver.
    """

    def __init__(
        self,
        servers: ApiServers,
        changed: Callable[[], None],
        resolve: Callable[[str], Sequence[str]] = addresses_of_name,
    ) -> None:
        self._servers = servers
        self._changed = changed
        self._resolve = resolve
        self._due = threading.Event()
        self._stopped = False

    def run(self, task: Task) -> None:
        """Resolve until :meth:`stop`."""
        # The resolver limits its time itself, and there is no way to interrupt it.
        task.idle()
        while True:
            self._due.clear()
            if self._stopped:
                return
            self.resolve()
            self._due.wait(NAMES_SECONDS)

    def resolve(self) -> None:
        """Resolve each name once. A name that has no address now keeps those that it had."""
        found = [self._servers.named(name, self._resolve(name)) for name in self._servers.names()]
        if any(found):
            self._changed()

    def follow(self) -> None:
        """Resolve at once if there is a name without an address; may be called from any thread."""
        if self._servers.unresolved:
            self._due.set()

    def stop(self) -> None:
        """End the thread soon."""
        self._stopped = True
        self._due.set()
