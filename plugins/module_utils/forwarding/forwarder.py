# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The forwarder: the table of listeners, and the sockets that serve it, in the thread of one loop.

Other threads call :meth:`Forwarder.apply`, :meth:`Forwarder.table`, :meth:`Forwarder.status` and
:meth:`Forwarder.stop`.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import select
import sys
import time
from typing import Any, Callable, Collection, Iterable, Iterator, Optional, TypeVar, Union

from ..base.addresses import LOOPBACK, family_of
from ..base.errors import KernelError
from ..base.loop import Loop
from ..clients import ClientRule, Shares
from ..rendering.userspace.model import TCP, UDP, Endpoint, Listener, ListenerKey
from ..resources import Change
from . import tcp, udp
from .balancing import Balancer, FailedEndpoints
from .limits import MOST_PIPES, Limits, Totals
from .opened import Client, Opened, Used, clients_of, opened_by, used_by_owner
from .relay import BUFFER_BYTES, RelayContext
from .splice import Pipes, find_splice

Item = TypeVar("Item")
Server = Union[tcp.TcpServer, udp.UdpServer]

_TICK_SECONDS = 0.2
_IDLE_SECONDS = 5.0
#: Seconds between attempts to open a socket that could not be opened.
RETRY_SECONDS = 5.0
#: Listeners changed per round; connections are served in between.
_CHUNK = 64
_READY_LISTENERS = 256
#: Time for connections from this node to be established that were being opened when their listener began to close.
_HANDSHAKE_SECONDS = 0.001
#: Interval, in seconds, after which Python's threads release the interpreter (5 ms by default). While the agent renders
#: thousands of Services, each system call of the loop may wait that long.
SWITCH_SECONDS = 0.0005
_SHOWN = 20
_REASONS = {
    errno.EADDRINUSE: "another program uses this address and port",
    errno.EADDRNOTAVAIL: "this node does not have the address",
    errno.EACCES: "ports below net.ipv4.ip_unprivileged_port_start need CAP_NET_BIND_SERVICE",
}


def _chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    rest = iter(items)
    return iter(lambda: list(itertools.islice(rest, _CHUNK)), [])


class Forwarder:
    """Own the listeners, and the connections through them.

    ``limits`` may be replaced at any time. ``clients``: who is one client. ``failed`` is called in the loop's thread
    with each unexpected exception; the connection concerned is reset.
    """

    def __init__(self, limits: Limits, clients: ClientRule, failed: Callable[[Exception], None]) -> None:
        self.limits = limits
        self.totals = Totals()
        self._report = failed
        self._loop = Loop(self._failed)
        self._listeners: dict[ListenerKey, Listener] = {}
        self._servers: dict[ListenerKey, Server] = {}
        self._by_number: dict[int, Server] = {}
        self._unbound: dict[ListenerKey, str] = {}
        # At which of them the next retry begins.
        self._tried = 0
        self._owners: collections.Counter[str] = collections.Counter()
        self._balancers: dict[str, Balancer] = {}
        self._failures = FailedEndpoints(limits.avoid_seconds, self._loop.clock)
        self._pipes = Pipes(MOST_PIPES)
        self._connections: Shares[tcp.Connection] = Shares(clients, self._evict, tcp.Connection.may_yield)
        buffer = memoryview(bytearray(BUFFER_BYTES))
        self._tcp = tcp.Shared(
            loop=self._loop,
            limits=lambda: self.limits,
            totals=self.totals,
            failed=self._failures,
            context=RelayContext(self.totals, self._pipes, find_splice(), buffer),
            connections=self._connections,
            connecting={},
            is_listener=lambda endpoint: ListenerKey(TCP, *endpoint) in self._listeners,
        )
        self._udp = udp.Shared(
            self._loop,
            lambda: self.limits,
            self.totals,
            self._failures,
            buffer,
            Shares(clients, self._evict),
            lambda endpoint: ListenerKey(UDP, *endpoint) in self._listeners,
        )
        # Listening sockets have a separate epoll, so that accepting can be suspended for all of them at once.
        self._accepting = select.epoll()
        self._paused_until = 0.0
        self._loop.watch(self._accepting.fileno(), self._accept, select.EPOLLIN)
        self._loop.every(_TICK_SECONDS, self._tick)
        self._loop.every(_IDLE_SECONDS, self._expire_idle)
        self._loop.every(RETRY_SECONDS, self._retry)

    # ---- called by other threads

    def table(self) -> dict[ListenerKey, Listener]:
        """Return all listeners, including those whose socket cannot be opened now (see :meth:`unbound`)."""
        return self._listeners.copy()

    def unbound(self) -> dict[ListenerKey, str]:
        """Return the listeners whose socket cannot be opened, with the reason. Opening is retried periodically."""
        return self._unbound.copy()

    def at_loopback(self, family: str) -> tuple[int, int]:
        """Return how many sockets listen at the loopback address of a family, and how often opening one failed."""
        sockets = [key for key in self._servers.copy() if key.address == LOOPBACK[family]]
        return len(sockets), self.totals.unopened[family]

    def apply(self, change: Change[ListenerKey, Listener]) -> None:
        """Apply a change to the table. Raises KernelError if the loop does not answer.

        A socket that cannot be opened concerns only its own listener. Open connections continue when their listener
        changes, and are reset when the last listener of their address is removed, because the address is removed next.
        """
        wanted = change.new_values()
        for chunk in _chunks(wanted.items()):
            self._loop.call(lambda items=chunk: self._put(items))  # type: ignore[misc]
        for keys in _chunks(change.removed):
            self._loop.call(lambda items=keys: self._drop(items))  # type: ignore[misc]
        if change.removed:
            left = {key.address for key in self.table()}
            gone = {key.address for key in change.removed} - left
            if gone:
                self._loop.call(lambda: self._reset_at(gone))

    def end_connections(self, owner: str, endpoint: Endpoint) -> int:
        """Reset the connections of a ServicePort that lead to an endpoint; return their number.

        Those that still wait for it to accept them go to another endpoint. Raises KernelError if the loop does not
        answer.
        """
        ended: list[tcp.Connection] = []
        self._loop.call(lambda: ended.extend(self._leave(owner, endpoint)))
        return len(ended)

    def opened(self, key: ListenerKey, client: Endpoint) -> list[Opened]:
        """Return what a client has open through a listener; port 0 is any. Raises KernelError as :meth:`apply` does."""
        return self._loop.call(lambda: list(opened_by(client, self._servers.get(key), self._connections)))

    def used(self) -> list[Used]:
        """Return what ServicePorts have sent to their endpoints. Raises KernelError as :meth:`apply` does."""
        return self._loop.call(lambda: list(used_by_owner(self._balancers, self._connections, self._udp.sessions)))

    def remembered(self, owner: str, client: str, seconds: int) -> Optional[tuple[Endpoint, float]]:
        """Return the endpoint of a client by affinity, which lasts ``seconds``, and how much of that is left.

        Raises KernelError as :meth:`apply` does.
        """

        def look_up() -> Optional[tuple[Endpoint, float]]:
            balancer = self._balancers.get(owner)
            return balancer.remembered(client, seconds) if balancer is not None else None

        return self._loop.call(look_up)

    def status(self) -> dict[str, Any]:
        """Return the state as plain JSON values.

        ``unbound``: some of the listeners whose address cannot be listened on, ``unboundCount`` all of them.
        """
        totals, unbound = self.totals, self.unbound()
        return {
            "listeners": len(self._listeners),
            "sockets": len(self._servers),
            "connections": len(self._connections),
            "sessions": len(self._udp.sessions),
            "mostConnections": self.limits.connections,
            "mostSessions": self.limits.sessions,
            "accepted": totals.accepted,
            "udpSessions": totals.sessions,
            "bytes": totals.bytes,
            "connectFailures": totals.connect_failures,
            "unreachable": totals.unreachable,
            "refusedBySourceRange": totals.refused_sources,
            "refusedByLimit": totals.refused_limit,
            "evicted": totals.evicted,
            "droppedDatagrams": totals.dropped,
            "unbound": [f"{key}: {reason}" for key, reason in list(unbound.items())[:_SHOWN]],
            "unboundCount": len(unbound),
        }

    def clients(self) -> list[Client]:
        """Return the open connections and sessions. Raises KernelError if the loop does not answer."""

        def found() -> list[Client]:
            served = (each for each in self._connections if self._servers.get(each.server.key) is each.server)
            return list(clients_of(served, self._udp.sessions))

        return self._loop.call(found)

    def stop(self) -> None:
        """Stop listening, wait up to ``drain_seconds`` for open connections, reset the others and end :meth:`run`."""
        with contextlib.suppress(KernelError):
            self._loop.call(self._stop_listening)
            end = time.monotonic() + self.limits.drain_seconds
            while len(self._connections) and time.monotonic() < end:
                time.sleep(0.02)
            self._loop.call(self._reset_all)
        self._loop.stop()

    # ---- the loop's thread

    def run(self, alive: Callable[[], None]) -> None:
        """Serve until :meth:`stop`; call ``alive`` periodically."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            self._loop.run(alive)
        finally:
            sys.setswitchinterval(before)

    def close(self) -> None:
        """Close every descriptor. :meth:`run` must have ended."""
        self._stop_listening()
        self._reset_all()
        self._pipes.close()
        self._accepting.close()
        self._loop.close()

    def _put(self, items: Collection[tuple[ListenerKey, Listener]]) -> None:
        self._close([(key, listener) for key, listener in items if not listener.endpoints])
        for key, listener in items:
            before = self._listeners.get(key)
            self._listeners[key] = listener
            self._owners[listener.owner] += 1
            if before is not None:
                self._release(before.owner)
            server = self._servers.get(key)
            if server is None:
                self._open(key, listener)
                continue
            server.listener = listener
            server.balancer = self._balancer(listener.owner)
            if isinstance(server, udp.UdpServer):
                server.keep_only(listener.endpoints)

    def _drop(self, keys: Iterable[ListenerKey]) -> None:
        removed = [(key, self._listeners.pop(key)) for key in keys if key in self._listeners]
        self._close([(key, listener._replace(endpoints=())) for key, listener in removed])
        for _key, listener in removed:
            self._release(listener.owner)

    def _balancer(self, owner: str) -> Balancer:
        balancer = self._balancers.get(owner)
        if balancer is None:
            balancer = Balancer(self._failures, self.limits.affinity_clients, self._loop.clock)
            self._balancers[owner] = balancer
        return balancer

    def _release(self, owner: str) -> None:
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]
            self._balancers.pop(owner, None)

    def _open(self, key: ListenerKey, listener: Listener) -> None:
        """Open the socket of a listener; without endpoints none is opened, and the kernel refuses clients.

        A listener stays among those that cannot be opened until its socket listens, since other threads read them.
        """
        if not listener.endpoints:
            self._unbound.pop(key, None)
            return
        if len(self._servers) >= self.limits.listeners:
            self._unbound[key] = f"there are {self.limits.listeners} listeners, as many as open files allow"
            return
        balancer = self._balancer(listener.owner)
        try:
            server: Server
            if key.protocol == TCP:
                server = tcp.TcpServer(key, listener, self._tcp, balancer)
            else:
                server = udp.UdpServer(key, listener, self._udp, balancer)
        except OSError as error:
            self._unbound[key] = _REASONS.get(error.errno or 0) or error.strerror or str(error)
            if key.address in LOOPBACK.values():
                self.totals.unopened[family_of(key.address)] += 1
            return
        self._servers[key] = server
        self._by_number[server.fileno()] = server
        self._accepting.register(server.fileno(), select.EPOLLIN)
        self._unbound.pop(key, None)

    def _close(self, items: Collection[tuple[ListenerKey, Listener]]) -> None:
        """Close the sockets of listeners; their connections continue."""
        closing: list[tuple[Server, Listener]] = []
        for key, listener in items:
            self._unbound.pop(key, None)
            server = self._servers.pop(key, None)
            if server is not None:
                closing.append((server, listener))
                self._accepting.unregister(server.fileno())
                del self._by_number[server.fileno()]
                server.ignore_new_clients()
        if closing:
            # A client that is connected but not accepted when its listener is closed would be reset.
            time.sleep(_HANDSHAKE_SECONDS)
        for server, listener in closing:
            server.close_listener()
            server.listener = listener

    def _accept(self, _mask: int) -> None:
        for number, _events in self._accepting.poll(0, _READY_LISTENERS):
            server = self._by_number.get(number)
            if server is not None and not server.accept():
                self._paused_until = self._loop.now + tcp.PAUSE_SECONDS
                self._loop.change(self._accepting.fileno(), 0)
                return

    def _tick(self) -> None:
        tcp.expire_attempts(self._tcp)
        if self._paused_until and self._loop.now >= self._paused_until:
            self._paused_until = 0.0
            self._loop.change(self._accepting.fileno(), select.EPOLLIN)

    def _expire_idle(self) -> None:
        tcp.expire_idle(self._tcp)
        udp.expire_silent(self._udp)
        self._failures.expire()

    def _retry(self) -> None:
        keys = list(self._unbound)
        # All are tried in turn, some at a time.
        first = self._tried if self._tried < len(keys) else 0
        self._tried = first + _CHUNK
        for key in keys[first : first + _CHUNK]:
            self._open(key, self._listeners[key])

    def _evict(self, item: Union[tcp.Connection, udp.Session]) -> None:
        self.totals.evicted += 1
        item.abort()

    def _leave(self, owner: str, endpoint: Endpoint) -> Iterator[tcp.Connection]:
        for connection in self._connections:
            if connection.endpoint != endpoint or connection.server.listener.owner != owner:
                continue
            if connection.relays:
                connection.abort()
                yield connection
            else:
                connection.give_up()

    def _reset_at(self, addresses: set[str]) -> None:
        for connection in self._connections:
            if connection.server.key.address in addresses:
                connection.abort()

    def _stop_listening(self) -> None:
        self._drop(list(self._listeners))

    def _reset_all(self) -> None:
        for connection in self._connections:
            connection.abort()

    def _failed(self, error: Exception, work: Callable[..., None]) -> None:
        concerned = getattr(work, "__self__", None)
        if isinstance(concerned, (tcp.Connection, udp.Session)):
            concerned.abort()
        self._report(error)
