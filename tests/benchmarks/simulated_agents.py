# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Many agents in one process, without a kernel: what each agent does with the API server, for ``many_agents``.

    python -m tests.benchmarks.simulated_agents KUBECONFIG NUMBER

Each has its own reflectors, threads, connections and view, as in the agent: lists and watches by TLS, decoding and
parsing. It prints ``ready``, starts following the API server at the first line of its input, and answers each further
line with a line of JSON, its counters so far. Bytes are those of HTTP, within TLS.
"""

from __future__ import annotations

import json
import queue
import resource
import ssl
import sys
import threading
from typing import Any

from tests import conftest  # noqa: F401  (makes the collection importable)

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.cluster_source import ClusterSource
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.disk_copy import DiskCopy
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.first_services import FirstObjects
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.collector import begin_loading, end_loading
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import Supervisor
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import Access, ApiConnection

NODE = "node1"


class Counters:
    """What all agents of this process have sent and received."""

    requests = 0
    sent = 0
    received = 0
    #: Objects delivered to views.
    objects = 0

    def observe(self, _method: str, _host: str, _code: str, _seconds: object) -> None:
        """Count a request."""
        self.requests += 1


COUNTERS = Counters()


class CountingSocket(ssl.SSLSocket):
    """Counts the bytes of all connections, of HTTP and not of TLS."""

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        """See the base class."""
        found = super().read(len, buffer)
        COUNTERS.received += found if isinstance(found, int) else found.__len__()
        return found

    def send(self, data: Any, flags: int = 0) -> int:
        """See the base class."""
        sent = super().send(data, flags)
        COUNTERS.sent += sent
        return sent


def count_bytes() -> None:
    """Have all connections of this process counted."""
    original = Access.tls_context

    def counting(access: Access) -> ssl.SSLContext:
        context = original(access)
        context.sslsocket_class = CountingSocket
        return context

    Access.tls_context = counting  # type: ignore[method-assign]


class Agents:
    """Agents whose batches one thread applies to the view of each, as the loop of an agent does."""

    def __init__(self, kubeconfig: str, number: int) -> None:
        self._batches: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._kubeconfig = kubeconfig
        self._log = Log(sys.stderr)
        self.sources = [self._source(index) for index in range(number)]
        self._loading = True

    def _source(self, index: int) -> ClusterSource:
        return ClusterSource(
            connect=self._connect,
            deliver=lambda batch: self._batches.put((index, batch)),
            supervisor=Supervisor(self._log),
            disk_copy=DiskCopy("", self._log),
            log=self._log,
            node_required=lambda: False,
        )

    def _connect(self, expect: Any, timeout: float = 30.0) -> ApiClient:
        connection = ApiConnection(kubeconfig=self._kubeconfig)
        return ApiClient(connection, timeout, expect=expect, observe=COUNTERS.observe)

    def start(self) -> None:
        """Begin to follow the API server, with all agents at once."""
        begin_loading()
        threading.Thread(target=self._apply, daemon=True).start()
        for source in self.sources:
            source.start(NODE, serving=False)

    def _apply(self) -> None:
        while True:
            index, batch = self._batches.get()
            if isinstance(batch, FirstObjects):
                # What the agent does when it has programmed them.
                self.sources[index].keep_first(batch)
                self.sources[index].follow_all()
                continue
            self.sources[index].view.apply(batch)
            self.sources[index].view.pop_dirty()
            COUNTERS.objects += len(batch.changed) + len(batch.gone)
            if self._loading and self.listed == len(self.sources):
                self._loading = False
                end_loading()

    @property
    def listed(self) -> int:
        """How many agents know the whole cluster."""
        return sum(source.listed for source in self.sources)

    def counters(self) -> dict[str, float]:
        """Return the counters so far."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "requests": COUNTERS.requests,
            "bytes": COUNTERS.sent + COUNTERS.received,
            "objects": COUNTERS.objects,
            "agent_processor_s": used.ru_utime + used.ru_stime,
            "listed": self.listed,
            "connected": sum(source.connected for source in self.sources),
        }


def main() -> int:
    """Run the agents until the input ends."""
    count_bytes()
    agents = Agents(sys.argv[1], int(sys.argv[2]))
    print("ready", flush=True)
    for number, _line in enumerate(sys.stdin):
        print(json.dumps(agents.counters()), flush=True)
        if not number:
            agents.start()
    return 0


if __name__ == "__main__":
    sys.exit(main())
