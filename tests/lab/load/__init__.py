# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A steady load of requests between namespaces, each of which is judged.

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

import json
import subprocess
import sys
import time
from collections import Counter
from typing import Any, Sequence

from tests.lab.load.model import LOST_SECONDS, Endpoint, Flow, Tally

__all__ = ("Endpoint", "Flow", "Load", "Tally")


class Load:
    """The load on a topology; a context manager. Flows and endpoints run in separate processes.

    ``patient``: see the text of this package.
    """

    def __init__(self, flows: Sequence[Flow], endpoints: Sequence[Endpoint], patient: bool = False) -> None:
        self._processes: list[subprocess.Popen[str]] = []
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
        problems: list[str] = []
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
