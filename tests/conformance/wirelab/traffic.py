# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Traffic: repeat a flow as often as its options and the outcomes so far require, and count the outcomes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from .flows import TRIES_DROPPED, Flow, tries_for
from .outcomes import answering_endpoint
from .results import FlowResult
from .senders import DROP, TRY_SECONDS, Senders, Try, failure

FIRST_BATCH, LATER_BATCH = 6, 25


class Traffic:
    """Runs flows with the senders of one lab."""

    def __init__(self, senders: Senders, time_scale: float = 1.0) -> None:
        self._senders = senders
        self._scale = time_scale

    async def run_together(self, flows: Sequence[Flow]) -> list[FlowResult]:
        """Run flows that do not depend on one another at once; return the results in the order of the flows."""
        return list(await asyncio.gather(*(self.run(flow) for flow in flows)))

    async def run(self, flow: Flow) -> FlowResult:
        """Run a tcp, udp or sctp flow."""
        tries = await (self._one_by_one(flow) if flow.ordered else self._many_at_once(flow))
        outcomes = Counter(done.outcome for done in tries)
        return {
            "flow": flow.text,
            "sent": sorted({done.sent_from for done in tries if done.sent_from}),
            "outcomes": dict(sorted(outcomes.items())),
        }

    async def run_held(self, flow: Flow) -> FlowResult:
        """Report whether a connection that an earlier flow left open still works."""
        return {"flow": flow.text, "outcomes": {await self._held(flow.name): 1}}

    async def _one_by_one(self, flow: Flow) -> list[Try]:
        tries = []
        for _ in range(flow.fixed_tries or 0):
            tries.append(await self._senders.attempt(flow))
            if "gap" in flow.options:
                await asyncio.sleep(float(flow.options["gap"]))
        return tries

    async def _many_at_once(self, flow: Flow) -> list[Try]:
        """Try in batches: the answers so far decide how many more tries see every endpoint."""
        tries: list[Try] = []
        while (missing := _tries_wanted(flow, tries) - len(tries)) > 0:
            batch = min(missing, LATER_BATCH if tries else FIRST_BATCH)
            tries += await asyncio.gather(*(self._senders.attempt(flow) for _ in range(batch)))
        return tries

    async def _held(self, name: str) -> str:
        connection = self._senders.open_connections.get(name)
        if connection is None:
            return "not open"
        loop = asyncio.get_running_loop()

        async def echo() -> bytes:
            await loop.sock_sendall(connection, b"ping\n")
            return await loop.sock_recv(connection, 100)

        try:
            return "alive" if await asyncio.wait_for(echo(), TRY_SECONDS * self._scale) else "closed"
        except asyncio.TimeoutError:
            return DROP
        except OSError as error:
            return failure(connection, error)


def _tries_wanted(flow: Flow, tries: Sequence[Try]) -> int:
    if flow.fixed_tries is not None:
        return flow.fixed_tries
    outcomes = {done.outcome for done in tries}
    if outcomes == {DROP}:
        return TRIES_DROPPED
    return tries_for(len({answering_endpoint(outcome) for outcome in outcomes}))
