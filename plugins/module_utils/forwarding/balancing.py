# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Choice of an endpoint: in turn or by client affinity, avoiding endpoints that have just failed."""

from __future__ import annotations

import collections
import random
from typing import Callable, Collection, Optional

from ..rendering.userspace.model import Endpoint, Listener

#: The most endpoints of a ServicePort whose connections are counted; endpoints come and go with pods.
MOST_COUNTED = 4096

Clock = Callable[[], float]


class FailedEndpoints:
    """Endpoints to which a connection failed within ``seconds``; used only if no others are left."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: dict[Endpoint, float] = {}

    def add(self, endpoint: Endpoint) -> None:
        """Record that a connection to the endpoint has failed."""
        self._until[endpoint] = self._clock() + self._seconds

    def discard(self, endpoint: Endpoint) -> None:
        """Record that the endpoint answers again."""
        self._until.pop(endpoint, None)

    def __contains__(self, endpoint: Endpoint) -> bool:
        until = self._until.get(endpoint)
        return until is not None and self._clock() < until

    def __len__(self) -> int:
        return len(self._until)

    def expire(self) -> None:
        """Forget failures older than ``seconds``."""
        now = self._clock()
        self._until = {endpoint: until for endpoint, until in self._until.items() if now < until}


class Balancer:
    """The position in the rotation, the affinity and the counters of one ServicePort; all its listeners share them.

    ``opened``: how many connections and sessions were opened to each endpoint, the latest endpoint last. At most
    ``most_clients`` clients are remembered; beyond that, those that connected least recently are forgotten. Those whose
    affinity has ended are forgotten in any case.
    """

    def __init__(self, failed: FailedEndpoints, most_clients: int, clock: Clock) -> None:
        self._failed = failed
        self._most_clients = most_clients
        self._clock = clock
        # Nodes that start together must not all start with the same endpoint.
        self._turn = random.randrange(1 << 16)
        self.opened: collections.OrderedDict[Endpoint, int] = collections.OrderedDict()
        self._clients: collections.OrderedDict[str, tuple[Endpoint, float]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def count(self, endpoint: Endpoint) -> None:
        """Count a connection or session that was opened to an endpoint."""
        self.opened[endpoint] = self.opened.pop(endpoint, 0) + 1
        if len(self.opened) > MOST_COUNTED:
            self.opened.popitem(last=False)

    def choose(self, listener: Listener, client: str, tried: Collection[Endpoint] = ()) -> Optional[Endpoint]:
        """Return the endpoint for a new connection of a client (its address), or None if all have been tried.

        With affinity, the chosen endpoint becomes that of the client.
        """
        now = self._clock()
        self._expire(now - listener.affinity_seconds)
        if not listener.affinity_seconds:
            return self._next(listener.endpoints, tried)
        known = self._clients.pop(client, None)
        endpoint: Optional[Endpoint] = None
        if known is not None and known[0] not in tried and known[0] in listener.endpoints:
            endpoint = known[0]
        endpoint = endpoint or self._next(listener.endpoints, tried)
        if endpoint is not None:
            self._clients[client] = (endpoint, now)
            if len(self._clients) > self._most_clients:
                self._clients.popitem(last=False)
        return endpoint

    def _expire(self, late: float) -> None:
        """Forget the clients that connected at this time or before; the client that connected last is the last one."""
        while self._clients and next(iter(self._clients.values()))[1] <= late:
            self._clients.popitem(last=False)

    def remembered(self, client: str, seconds: int) -> Optional[tuple[Endpoint, float]]:
        """Return the endpoint of a client and for how long it remains that, or None; affinity lasts ``seconds``."""
        known = self._clients.get(client)
        left = known[1] + seconds - self._clock() if known is not None else 0.0
        return (known[0], left) if known is not None and left > 0 else None

    def _next(self, endpoints: tuple[Endpoint, ...], tried: Collection[Endpoint]) -> Optional[Endpoint]:
        count = len(endpoints)
        fallback: Optional[Endpoint] = None
        for _attempt in range(count):
            self._turn += 1
            endpoint = endpoints[self._turn % count]
            if endpoint in tried:
                continue
            if endpoint not in self._failed:
                return endpoint
            fallback = fallback or endpoint
        return fallback
