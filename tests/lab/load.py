# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A steady load of requests from namespace to namespace, each of them judged.

:class:`Load` runs two processes: one has all endpoints, the other all clients. A request is a number; an endpoint
answers it with the number and the client's address as it sees it. Requests go over new TCP connections, over TCP
connections that are kept, and over UDP, and start at a fixed rate whether or not earlier ones have been answered.

No request is judged by its duration, since a busy machine may be slow. TCP reports whether it repeated the request for
a connection. The kernel at the other end answers such a request at once, however busy the programs are, so a repetition
means that a packet was lost. (``patient`` skips this check where that kernel itself may be delayed, such as an emulated
one on a busy machine.) Any other request is lost when there is no answer for very long.

A client uses one source port after the other, so that none is used again within minutes. When IPVS forgets a
connection, some time after its end, it deletes the connection tracking entry that has its addresses and ports by then
(kernel: ip_vs_conn_drop_conntrack), whichever mode serves.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from tests.lab.system import socket_inside

LOST_SECONDS = 15.0
_TICK_SECONDS = 0.002
# No more than this many at once, so that a machine that cannot keep up does less instead of failing.
_MOST_OPEN = 256
_BEHIND_SECONDS = 0.1
# linux/tcp.h: struct tcp_info begins with 8 bytes, then 32 bit fields; tcpi_total_retrans is the 24th of them.
_TOTAL_RETRANS = 8 + 23 * 4
_FIRST_PORT, _LAST_PORT = 33000, 60999
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Flow(NamedTuple):
    """Requests from a place (the path of a namespace) to a frontend.

    ``kind``: new, kept (both TCP), udp (each request from a new socket) or kept-udp. ``own``: whether the endpoint must
    see the client's own address; None if either will do. ``rate``: requests a second.
    ``connections``: how many are kept.
    """

    place: str
    kind: str
    address: str
    port: int
    rate: float
    own: Optional[bool] = None
    connections: int = 4

    @property
    def is_udp(self) -> bool:
        """Whether requests go over UDP."""
        return self.kind.endswith("udp")

    @property
    def is_kept(self) -> bool:
        """Whether requests share sockets."""
        return self.kind.startswith("kept")


class Endpoint(NamedTuple):
    """What answers: a place, tcp or udp, an address to listen on (empty for all) and a port."""

    place: str
    protocol: str
    address: str
    port: int


class Tally(NamedTuple):
    """What became of requests since the last tally: answers by flow, problems in words, seconds, requests waiting.

    ``complete``: every flow that was waited for has had its answers.
    """

    answers: Dict[str, int]
    problems: List[str]
    seconds: float
    waiting: int
    complete: bool = True

    @property
    def requests(self) -> int:
        """Answered requests."""
        return sum(self.answers.values())

    def __str__(self) -> str:
        rate = self.requests / self.seconds if self.seconds else 0.0
        return f"{self.requests} answers in {self.seconds:.1f} s ({rate:.0f}/s), {len(self.problems)} problems"


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


# ---- endpoints


def _listen(endpoint: Endpoint) -> socket.socket:
    kind = socket.SOCK_STREAM if endpoint.protocol == "tcp" else socket.SOCK_DGRAM
    sock = socket_inside(endpoint.place, _family(endpoint.address), kind)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((endpoint.address, endpoint.port))
    if endpoint.protocol == "tcp":
        sock.listen(1024)
    sock.setblocking(False)
    return sock


def serve(endpoints: Sequence[Endpoint]) -> None:
    """Answer until standard input ends."""
    chooser = selectors.DefaultSelector()
    chooser.register(sys.stdin.buffer, selectors.EVENT_READ, "end")
    for endpoint in endpoints:
        chooser.register(_listen(endpoint), selectors.EVENT_READ, endpoint.protocol)
    print("ready", flush=True)
    while True:
        for key, _events in chooser.select():
            sock: Any = key.fileobj
            if key.data == "end":
                return
            try:
                _answer(chooser, sock, key.data)
            except BlockingIOError:
                continue
            except OSError:
                if key.data == "accepted":
                    chooser.unregister(sock)
                    sock.close()


def _answer(chooser: selectors.BaseSelector, sock: socket.socket, what: str) -> None:
    if what == "udp":
        data, peer = sock.recvfrom(100)
        sock.sendto(data.rstrip(b"\n") + b" " + peer[0].encode() + b"\n", peer)
        return
    if what == "tcp":
        for _ in range(64):
            accepted, _peer = sock.accept()
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            chooser.register(accepted, selectors.EVENT_READ, "accepted")
        return
    data = sock.recv(100)
    if not data:
        chooser.unregister(sock)
        sock.close()
        return
    sock.sendall(data.rstrip(b"\n") + b" " + sock.getpeername()[0].encode() + b"\n")


# ---- clients


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


class _Clients:
    """All flows in one loop. ``patient``: a connection may be made at a later attempt."""

    def __init__(self, flows: Sequence[Flow], patient: bool) -> None:
        self._patient = patient
        self._flows = flows
        self._chooser = selectors.DefaultSelector()
        self._chooser.register(sys.stdin.buffer, selectors.EVENT_READ, None)
        self._open: Dict[int, _Request] = {}
        self._idle: Dict[Flow, List[socket.socket]] = {flow: [] for flow in flows}
        self._kept: Counter[Flow] = Counter()
        self._next = {flow: time.monotonic() + index / 997 for index, flow in enumerate(flows)}
        self._ports: Dict[Any, int] = {}
        self._number = 0
        self._answers: Counter[str] = Counter()
        self._problems: List[str] = []
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
        sock = socket_inside(flow.place, _family(flow.address), kind)
        sock.setblocking(False)
        self._bind(sock, flow)
        if not flow.is_udp:
            # Close with a reset: a masqueraded port that meets one in TIME_WAIT would count as lost.
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


# ---- from outside


class Load:
    """The load on a topology; a context manager. Flows and endpoints run in processes of their own.

    ``patient``: see the top of this file.
    """

    def __init__(self, flows: Sequence[Flow], endpoints: Sequence[Endpoint], patient: bool = False) -> None:
        self._processes: List[subprocess.Popen[str]] = []
        self._server = self._start("serve", endpoints)
        assert self._server.stdout is not None
        if self._server.stdout.readline() != "ready\n":
            self.close()
            raise RuntimeError("the endpoints of the load did not start")
        self._clients = self._start("ask-patiently" if patient else "ask", flows)

    def _start(self, what: str, items: Sequence[Any]) -> subprocess.Popen[str]:
        argument = json.dumps([item._asdict() for item in items])
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.load", what, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _ask(self, line: str) -> Tally:
        assert self._clients.stdin is not None and self._clients.stdout is not None
        self._clients.stdin.write(line + "\n")
        self._clients.stdin.flush()
        answer = self._clients.stdout.readline()
        if not answer:
            raise RuntimeError("the clients of the load have ended")
        return Tally(**json.loads(answer))

    def take(self, flows: int = 0, each: int = 0, timeout: float = 60.0) -> Tally:
        """Return what happened since the last call, after waiting for ``each`` more answers to ``flows`` flows each."""
        answers: Counter[str] = Counter()
        problems: List[str] = []
        seconds = 0.0
        deadline = time.monotonic() + timeout
        after: Counter[str] = Counter()
        while True:
            tally = self._ask("tell")
            answers.update(tally.answers)
            problems += tally.problems
            seconds += tally.seconds
            if seconds != tally.seconds:
                after.update(tally.answers)
            done = len([name for name, count in after.items() if count >= each]) >= flows
            if flows == 0 or done or problems or time.monotonic() > deadline:
                return Tally(dict(answers), problems, seconds, tally.waiting, flows == 0 or done)
            time.sleep(0.05)

    def settle(self, flows: int, timeout: float = 120.0) -> None:
        """Wait until every flow works; until neighbours know each other, packets may be lost."""
        deadline = time.monotonic() + timeout
        while True:
            self._ask("forgive")
            tally = self.take(flows, 5, 20.0)
            if not tally.problems and tally.complete:
                self._ask("forgive")
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the load does not get through: {tally.answers}, {tally.problems[:5]}")

    def rest(self, timeout: float = LOST_SECONDS + 5) -> Tally:
        """Start no more requests, wait for those in progress, and return their tally."""
        deadline = time.monotonic() + timeout
        tally = self._ask("rest")
        problems = list(tally.problems)
        while tally.waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            tally = self._ask("rest")
            problems += tally.problems
        return tally._replace(problems=problems)

    def close(self) -> None:
        """End both processes."""
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def main(arguments: Sequence[str]) -> int:
    """Run ``serve``, ``ask`` or ``ask-patiently`` with the endpoints or flows given as JSON."""
    items = json.loads(arguments[1])
    if arguments[0] == "serve":
        serve([Endpoint(**item) for item in items])
    else:
        _Clients([Flow(**item) for item in items], arguments[0] == "ask-patiently").run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
