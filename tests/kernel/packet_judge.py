# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A network in which the packets of the simulated states are sent, all at once, and their fates are compared.

The test's own namespace is the node. Every endpoint has a namespace, as have the other pod and the clients. What the
node does not redirect arrives at a namespace with every address.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from pathlib import Path
from typing import Any, Iterator, Mapping

from tests.lab.system import inside, ip_batch
from tests.unit.transitions.states import NETS, Packet

EVERYWHERE = "everywhere"
REFUSED, LOST = "refused", "lost"
_PORTS = (80, 81, 8080)
#: How long answers may take, and how long one that must not come is waited for.
_PATIENCE, _GRACE = 5.0, 0.06

#: ``refused``, ``lost``, or the address of the server with whether the connection is masqueraded.
Fate = Any


class Judge:
    """The network of a family."""

    def __init__(self, family: str) -> None:
        self._net = NETS[family]
        self._kind = socket.AF_INET6 if family == "IPv6" else socket.AF_INET
        self._prefix = f"judge{os.getpid()}"
        self._servers = selectors.DefaultSelector()
        self._stack = contextlib.ExitStack()
        self._next_port: dict[str, int] = {}
        pods = (*self._net.pods, self._net.clients[0])
        self._place = {ip: f"p{number}" for number, ip in enumerate(pods)}
        self._place.update(dict.fromkeys(self._net.clients[1:], "x"))
        bits, self._nodad = ("128", " nodad") if family == "IPv6" else ("32", "")
        ip_batch(["link set lo up", f"address add {self._net.node}/{bits} dev lo{self._nodad}"])
        for path, value in (
            ("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1"), ("ipv4/icmp_ratemask", "0"),
            ("ipv6/icmp/ratemask", "\n"), ("ipv6/conf/default/accept_dad", "0"), ("ipv6/conf/all/accept_dad", "0"),
        ):  # fmt: skip
            Path("/proc/sys/net", path).write_text(value, encoding="ascii")
        for place in (*dict.fromkeys(self._place.values()), EVERYWHERE):
            self._attach(place, [ip for ip, where in self._place.items() if where == place], bits)
        for ip in self._net.pods:
            self._serve(ip, self._place[ip])
        self._serve(EVERYWHERE, EVERYWHERE)

    def _attach(self, place: str, addresses: list[str], bits: str) -> None:
        space, link = f"{self._prefix}-{place}", f"v{place[:8]}"
        ip_batch([f"netns add {space}"])
        self._stack.callback(ip_batch, [f"netns delete {space}"])
        with inside(f"/run/netns/{space}"):
            Path("/proc/sys/net/ipv6/conf/default/accept_dad").write_text("0", encoding="ascii")
        node = self._net.node
        ip_batch([f"link add {link} type veth peer name eth0 netns {space}", f"link set {link} up"])
        near = [f"address add {node}/{bits} dev {link}{self._nodad}"]
        far = ["link set lo up", "link set eth0 up"]
        far += [f"address add {ip}/{bits} dev eth0{self._nodad}" for ip in addresses]
        far += [f"route add {node} dev eth0", f"route add default via {node} dev eth0"]
        near += [f"route add {ip} dev {link} src {node}" for ip in addresses]
        if place == EVERYWHERE:
            gateway = "fe80::99" if self._kind == socket.AF_INET6 else "192.0.0.8"
            far += [f"address add {gateway}/{bits} dev eth0{self._nodad}"]
            far += [f"route add local {net} dev lo" for net in self._of_services()]
            near += [f"route add default via {gateway} dev {link} onlink src {node}"]
        ip_batch(far, space)
        ip_batch(near)

    def _of_services(self) -> list[str]:
        """Return the networks of the addresses of Services."""
        if self._kind == socket.AF_INET6:
            return ["fd00:10:96::/112", "2001:db8:52::/112", "2001:db8:53::/112"]
        return ["10.96.0.0/24", "203.0.113.0/24", "198.18.0.0/24"]

    def _serve(self, name: str, place: str) -> None:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            for port in _PORTS if name == EVERYWHERE else (8080,):
                sock = self._stack.enter_context(self._socket(place, kind))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if kind == socket.SOCK_DGRAM and name == EVERYWHERE:
                    # An answer must come from the address that was asked.
                    level, option = (41, 49) if self._kind == socket.AF_INET6 else (0, 8)
                    sock.setsockopt(level, option, 1)
                    if self._kind == socket.AF_INET6:
                        sock.setsockopt(level, 78, 1)  # IPV6_FREEBIND
                sock.bind(("::" if self._kind == socket.AF_INET6 else "0.0.0.0", port))
                if kind == socket.SOCK_STREAM:
                    sock.listen(256)
                self._servers.register(sock, selectors.EVENT_READ, (name, kind))

    @contextlib.contextmanager
    def _socket(self, place: str, kind: int) -> Iterator[socket.socket]:
        space = inside(f"/run/netns/{self._prefix}-{place}") if place else contextlib.nullcontext()
        with space:
            sock = socket.socket(self._kind, kind)
        sock.setblocking(False)
        with sock:
            yield sock

    def close(self) -> None:
        self._stack.close()

    def _answer(self, sock: socket.socket, name: str, kind: int) -> None:
        if kind == socket.SOCK_STREAM:
            peer, address = sock.accept()
            with peer:
                peer.send(f"{name} {address[0]}".encode())
            return
        _data, ancillary, _flags, address = sock.recvmsg(100, 200)
        said = f"{name} {address[0]}".encode()
        sock.sendmsg([said], ancillary, 0, address)

    def fates(self, expected: Mapping[Packet, frozenset[Fate]]) -> dict[Packet, Fate]:
        """Send the packets at once; return what has become of each."""
        found: dict[Packet, Fate] = {}
        with contextlib.ExitStack() as stack:
            waiting: dict[int, tuple[Packet, socket.socket]] = {}
            for packet in expected:
                sock = stack.enter_context(self._send(packet, found))
                if packet not in found:
                    waiting[sock.fileno()] = packet, sock
                    self._servers.register(sock, selectors.EVENT_READ, None)
            started = time.monotonic()
            while waiting:
                lost_only = all(LOST in expected[packet] for packet, _sock in waiting.values())
                events = self._servers.select(_GRACE if lost_only else 0.5)
                if not events and (lost_only or time.monotonic() - started > _PATIENCE):
                    break
                for key, _mask in events:
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if key.data:
                        self._answer(sock, *key.data)
                    else:
                        packet, _sock = waiting[sock.fileno()]
                        with contextlib.suppress(BlockingIOError):
                            found[packet] = self._heard(sock, packet)
                            del waiting[sock.fileno()]
                            self._servers.unregister(sock)
            for packet, sock in waiting.values():
                self._servers.unregister(sock)
                found[packet] = LOST
        return found

    @contextlib.contextmanager
    def _send(self, packet: Packet, found: dict[Packet, Fate]) -> Iterator[socket.socket]:
        kind = socket.SOCK_DGRAM if packet.protocol == "udp" else socket.SOCK_STREAM
        with self._socket(self._place.get(packet.source, ""), kind) as sock:
            # Each port is used once: the kernel does not judge packets of a known connection again.
            port = self._next_port[packet.source] = self._next_port.get(packet.source, 10000) + 1
            sock.bind((packet.source, port))
            try:
                sock.connect((packet.destination, packet.port))
                if packet.protocol == "udp":
                    sock.send(b"x")
            except ConnectionRefusedError:
                found[packet] = REFUSED
            except (BlockingIOError, PermissionError):
                # A packet of the node that is not sent may still be refused by a message to its socket.
                pass
            yield sock

    def _heard(self, sock: socket.socket, packet: Packet) -> Fate:
        try:
            said = sock.recv(200).decode().split()
        except ConnectionRefusedError:
            return REFUSED
        return (said[0], said[1] != packet.source) if len(said) == 2 else LOST
