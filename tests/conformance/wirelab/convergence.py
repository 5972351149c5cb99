# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait until a daemon has programmed a step completely.

A proxy may program its services one after the other, so the sentinel can answer while the rest is still to come.
Therefore the sentinel is changed once more: when that shows, the pass in which the first change was seen is over. Where
a proxy counts its passes in its metrics as kube-proxy does, the end of the pass can be looked up there instead.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time

from . import sentinel
from .addressing import join_host_port
from .cases import Case
from .feeds import Feed
from .flows import Flow, parse_flow
from .options import RunOptions
from .runner import Runner, RunnerFailed
from .senders import Senders
from .web import fetch

SENTINEL_SECONDS = 30
SENTINEL_TRY_SECONDS = 0.4
SENTINEL_PAUSE = 0.05
# Tries after which a second endpoint that is still served would have answered.
ZONE_TRIES = 13
METRICS_SECONDS = 15
METRICS_PAUSE = 0.2
_PASSES = re.compile(
    r'^kubeproxy_sync_proxy_rules_duration_seconds_count\{[^}]*ip_family="(IPv[46])"[^}]*\} (\S+)$', re.MULTILINE
)


class Convergence:
    """Follows one daemon through the steps of one case. *milliseconds* has how long each step took."""

    def __init__(self, case: Case, options: RunOptions, senders: Senders, feed: Feed, runner: Runner) -> None:
        self._case = case
        self._options = options
        self._scale = options.time_scale
        self._senders = senders
        self._feed = feed
        self._runner = runner
        self.milliseconds: list[int] = []

    async def wait(self, number: int) -> None:
        """Wait until the step is programmed. Raises RunnerFailed if the proxy ends or is too late."""
        start = time.monotonic()
        if self._options.sync_metrics:
            await self._wait_for_next_pass(await self._wait_for_sentinel(number, number), number)
        else:
            await self._wait_for_sentinel(number, number)
            snapshot = self._feed.touch_sentinel(number)
            if snapshot is not None:
                self._runner.write_snapshot(snapshot)
            await self._wait_for_sentinel(sentinel.SECOND + number, number)
        self.milliseconds.append(int(1000 * (time.monotonic() - start)))
        await asyncio.sleep(self._options.settle * self._scale)

    async def _wait_for_sentinel(self, announced: int, step: int) -> dict[str, float]:
        """Wait for the sentinel and return the passes counted by then, by IP family (with metrics only)."""
        deadline = time.monotonic() + SENTINEL_SECONDS * max(1.0, self._scale)
        passes = {}
        for family in self._case.families:
            target = join_host_port(sentinel.ADDRESS[family], sentinel.service_port(announced))
            flow = parse_flow(f"tcp node -> {target} tries=1")
            while True:
                self._runner.check_alive()
                seen = await self._endpoints_seen(flow, step)
                if seen == self._endpoints_wanted(family, announced, step):
                    break
                if time.monotonic() > deadline:
                    raise RunnerFailed(
                        f"the proxy did not converge in time: sentinel {announced}, IPv{family}:"
                        f" {', '.join(sorted(seen))}"
                    )
                await asyncio.sleep(SENTINEL_PAUSE * self._scale**2)
            if self._options.sync_metrics:
                passes[f"IPv{family}"] = (await self._passes()).get(f"IPv{family}", 0.0)
        return passes

    async def _endpoints_seen(self, flow: Flow, step: int) -> set[str]:
        tries = ZONE_TRIES if self._case.zone_hint(step).zone else 1
        return {
            (await self._senders.attempt_once(flow, SENTINEL_TRY_SECONDS * self._scale)).outcome.split(" ")[0]
            for _ in range(tries)
        }

    def _endpoints_wanted(self, family: int, announced: int, step: int) -> set[str]:
        hint = self._case.zone_hint(step)
        wanted = [sentinel.ENDPOINT[family]]
        if hint.zone and not hint.node_has_zone:
            wanted.append(sentinel.OTHER_ENDPOINT[family])
        return {join_host_port(address, sentinel.endpoint_port(announced)) for address in wanted}

    async def _wait_for_next_pass(self, before: dict[str, float], number: int) -> None:
        end = time.monotonic() + METRICS_SECONDS * self._scale
        while time.monotonic() < end:
            now = await self._passes()
            if all(now.get(family, 0.0) > count for family, count in before.items()):
                return
            await asyncio.sleep(METRICS_PAUSE * self._scale)
        # This is not an error: a proxy that has nothing left to do makes no further pass.
        print(f"    {self._case.name} step {number}: no later pass counted", file=sys.stderr, flush=True)

    async def _passes(self) -> dict[str, float]:
        """Return the completed passes by IP family, from the proxy's metrics."""
        response = await fetch(self._senders, parse_flow(f"http node -> {self._options.sync_metrics}"), self._scale)
        body = "" if isinstance(response, str) else response.body
        return {match.group(1): float(match.group(2)) for match in _PASSES.finditer(body)}
