# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The process with all clients of a load."""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from typing import Any, Sequence

from tests.lab.load.model import LOST_SECONDS, Flow, Tally, family_of
from tests.lab.system import socket_inside

_TICK_SECONDS = 0.002
# Most requests at once, so that a machine that cannot keep up sends fewer instead of failing.
_MOST_OPEN = 256
_BEHIND_SECONDS = 0.1
# linux/tcp.h: struct tcp_info begins with 8 bytes, then 32 bit fields; tcpi_total_retrans is the 24th of them.
_TOTAL_RETRANS = 8 + 23 * 4
_FIRST_PORT, _LAST_PORT = 33000, 60999
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class _Request:
    """One request in progress."""

    def __init__(self, flow: Flow, sock: socket.socket, number: int, fresh: bool) -> None:
        self.flow = flow
        self.fresh = fresh
        self.sock = sock
        self.number = number
        self.begun = time.monotonic()
        self.sent = False
        self.received = b""


class Clients:
    """All flows in one loop. ``patient``: a connection may be made at a later attempt."""

    def __init__(self, flows: Sequence[Flow], patient: bool) -> None:
        self._patient = patient
        self._flows = flows
        self._chooser = selectors.DefaultSelector()
        self._chooser.register(sys.stdin.buffer, selectors.EVENT_READ, None)
        self._open: dict[int, _Request] = {}
        self._idle: dict[Flow, list[socket.socket]] = {flow: [] for flow in flows}
        self._kept: Counter[Flow] = Counter()
        self._next = {flow: time.monotonic() + index / 997 for index, flow in enumerate(flows)}
        self._ports: dict[Any, int] = {}
        self._number = 0
        self._answers: Counter[str] = Counter()
        self._problems: list[str] = []
        self._since = time.monotonic()
        self._resting = False
        self._forgiven = 0

    def run(self) -> None:
        """Send until standard input ends, and print a tally for each line of it.

        On ``rest`` start no more requests; on ``forgive`` do not count those in progress.
        """
        while True:
            now = time.monotonic()
            if not self._resting:
                self._begin_due(now)
            for key, _events in self._chooser.select(_TICK_SECONDS):
                if key.data is None:
                    line = sys.stdin.buffer.readline()
                    if not line:
                        return
                    self._resting = self._resting or line == b"rest\n"
                    if line == b"forgive\n":
                        self._forgiven, self._problems = self._number, []
                    self._tell()
                else:
                    self._go_on(key.data)
            self._give_up()

    def _tell(self) -> None:
        now = time.monotonic()
        tally = Tally(dict(self._answers), self._problems, now - self._since, len(self._open))
        print(json.dumps(tally._asdict()), flush=True)
        self._answers.clear()
        self._problems = []
        self._since = now

    def _begin_due(self, now: float) -> None:
        for flow in self._flows:
            if now - self._next[flow] > _BEHIND_SECONDS:
                self._next[flow] = now
            while self._next[flow] <= now:
                self._next[flow] += 1 / flow.rate
                if len(self._open) < _MOST_OPEN:
                    self._begin(flow)

    def _begin(self, flow: Flow) -> None:
        fresh = False
        if flow.is_kept and self._idle[flow]:
            sock = self._idle[flow].pop(0)
        elif flow.is_kept and self._kept[flow] >= flow.connections:
            return
        else:
            sock, fresh = self._connect(flow), True
        self._number += 1
        request = _Request(flow, sock, self._number, fresh)
        self._open[sock.fileno()] = request
        self._chooser.register(sock, selectors.EVENT_WRITE, request)

    def _connect(self, flow: Flow) -> socket.socket:
        kind = socket.SOCK_DGRAM if flow.is_udp else socket.SOCK_STREAM
        sock = socket_inside(flow.place, family_of(flow.address), kind)
        sock.setblocking(False)
        self._bind(sock, flow)
        if not flow.is_udp:
            # Close with a reset: a request whose masqueraded port is in TIME_WAIT would count as lost.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._kept[flow] += 1
        sock.connect_ex((flow.address, flow.port))
        return sock

    def _bind(self, sock: socket.socket, flow: Flow) -> None:
        """Take the next port that is free."""
        user = (flow.place, sock.family, sock.type)
        while True:
            port = self._ports.get(user, _FIRST_PORT)
            self._ports[user] = _FIRST_PORT if port == _LAST_PORT else port + 1
            try:
                sock.bind(("::" if sock.family == socket.AF_INET6 else "0.0.0.0", port))
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise

    def _go_on(self, request: _Request) -> None:
        try:
            if not request.sent:
                problem = request.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if problem:
                    self._fail(request, os.strerror(problem))
                    return
                if request.fresh and not request.flow.is_udp and not self._patient:
                    self._check_connection(request)
                request.sock.send(b"%d\n" % request.number)
                request.sent = True
                self._chooser.modify(request.sock, selectors.EVENT_READ, request)
                return
            data = request.sock.recv(200)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(request, error.strerror or str(error))
            return
        request.received += data
        if not data:
            self._fail(request, "closed by the other end")
        elif request.received.endswith(b"\n"):
            self._judge(request)

    def _judge(self, request: _Request) -> None:
        words = request.received.decode().split()
        flow, own = request.flow, request.sock.getsockname()[0]
        if len(words) != 2 or words[0] != str(request.number):
            self._fail(request, f"answered {request.received!r} to request {request.number}")
            return
        if flow.own is not None and (words[1] == own) != flow.own:
            self._fail(request, f"the endpoint saw {words[1]}, the client is {own}")
            return
        self._answers[f"{flow.kind} {flow.address}"] += 1
        self._end(request, keep=flow.is_kept)

    def _check_connection(self, request: _Request) -> None:
        """Record a problem if the client had to request a new connection more than once."""
        info = request.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        again = int(struct.unpack_from("=I", info, _TOTAL_RETRANS)[0])
        if again and request.number > self._forgiven:
            self._problems.append(f"{self._name(request)}: connected after {again + 1} attempts")

    def _give_up(self) -> None:
        now = time.monotonic()
        for request in [item for item in self._open.values() if now - item.begun > LOST_SECONDS]:
            self._fail(request, f"no answer within {LOST_SECONDS:g} s")

    @staticmethod
    def _name(request: _Request) -> str:
        flow = request.flow
        place, source = flow.place.rpartition("-")[2], request.sock.getsockname()[1]
        return f"{request.begun:.3f} {place} port {source} {flow.kind} {flow.address} port {flow.port}"

    def _fail(self, request: _Request, why: str) -> None:
        stage = "" if request.sent else " while connecting"
        if request.number > self._forgiven:
            self._problems.append(f"{self._name(request)}: {why}{stage}")
        self._end(request, keep=False)

    def _end(self, request: _Request, keep: bool) -> None:
        number = request.sock.fileno()
        self._chooser.unregister(request.sock)
        del self._open[number]
        if keep:
            self._idle[request.flow].append(request.sock)
            return
        self._kept[request.flow] -= 1
        request.sock.close()
