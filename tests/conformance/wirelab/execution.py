# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run one case: build the network, start the proxy, and send the flows of each step."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from . import web
from .cases import Case, Step
from .convergence import Convergence
from .endpoints import Endpoints
from .feeds import Feed
from .flows import Flow
from .objects import merge
from .options import RunOptions
from .results import FlowResult, StepResult
from .runner import Runner
from .senders import Senders
from .state import programmed
from .topology import Topology
from .traffic import Traffic

LOG_LINE_LENGTH = 300


@dataclass
class Observation:
    """The results, the programmed state (if requested), the text of the metrics (if a flow fetched it), and how long a
    daemon took in each step.
    """

    steps: list[StepResult] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    metrics_text: str | None = None
    sync_milliseconds: list[int] = field(default_factory=list)


class Execution:
    """One case, run once, in the running event loop."""

    def __init__(self, case: Case, options: RunOptions, feed: Feed) -> None:
        self._case = case
        self._options = options
        self._feed = feed
        self._mode = options.runner.mode
        self._topology = Topology(options.instance, case.pod_network)
        self._senders = Senders(self._topology, options.time_scale)
        self._traffic = Traffic(self._senders, options.time_scale)
        self._endpoints = Endpoints(self._topology)
        self._runner = Runner(case, options.runner, self._topology.full_name("node"), feed.server, options.instance)
        self._convergence = Convergence(case, options, self._senders, feed, self._runner)
        self._changes: dict[str, Any] = {}
        self._node_changes: dict[str, Any] = {}
        self._seen = Observation(sync_milliseconds=self._convergence.milliseconds)

    async def run(self) -> Observation:
        """Run the case. Raises RunnerFailed if the proxy fails, LabError or OSError if the lab cannot be built."""
        try:
            self._topology.build()
            for listener in sorted(self._case.listeners()):
                self._endpoints.listen(listener)
            self._feed.start(self._topology.namespaces["node"])
            for number, step in enumerate(self._case.steps):
                await self._step(number, step)
        except Exception:
            for line in self._runner.log_tail():
                _log("    | " + line[:LOG_LINE_LENGTH])
            raise
        finally:
            await self._close()
        return self._seen

    async def _close(self) -> None:
        self._runner.stop()
        self._senders.close()
        self._endpoints.close()
        self._feed.close()
        await asyncio.sleep(0)  # lets cancelled tasks end before their namespaces go
        self._topology.destroy()
        self._runner.remove(self._options.keep_logs)

    async def _step(self, number: int, step: Step) -> None:
        reconfigured = bool(step.config or step.node_config)
        if reconfigured or not number:
            # Write it only after the stop: kube-proxy exits when its configuration file changes.
            self._changes = merge(self._changes, step.config)
            self._node_changes = merge(self._node_changes, step.node_config)
            self._runner.write_configuration(self._changes, self._node_changes)
        for command in step.commands:
            status, output = await self._runner.shell(command)
            if status:
                # A variant of iptables may lack what the command removes or lists; the flows show what matters.
                _log(f"    exec {command!r} exited with {status}: {output.strip()}")
        if step.stop or step.restart or reconfigured:
            self._runner.stop(signal.SIGKILL if step.kill else signal.SIGTERM)
        self._runner.write_snapshot(self._feed.step(number, step))
        await self._converge(number, step)
        if step.wait:
            await asyncio.sleep(step.wait * self._options.time_scale)
        if self._options.want_state:
            self._seen.state += programmed(self._mode, f"{number} {step.name}", self._runner.output_of)
        self._seen.steps.append({"step": step.name, "flows": await self._flows(step)})

    async def _converge(self, number: int, step: Step) -> None:
        if step.cleanup:
            self._runner.stop()
            await self._runner.clean_up()
        elif step.stop:
            return
        elif self._options.runner.oneshot:
            await self._runner.converge()
        else:
            self._runner.start()
            await self._convergence.wait(number)

    async def _flows(self, step: Step) -> list[FlowResult]:
        """Return the results in the order of the case; those that can run together have run first."""
        mode, skipped = self._options.flows_of or self._mode, self._options.skipped_kinds
        flows = [flow for flow in step.flows if flow.wanted(mode) and flow.kind not in skipped]
        together = [flow for flow in flows if not flow.ordered]
        results = dict(zip(map(id, together), await self._traffic.run_together(together)))
        for flow in flows:
            if flow.ordered:
                results[id(flow)] = await self._ordered(flow)
        return [results[id(flow)] for flow in flows]

    async def _ordered(self, flow: Flow) -> FlowResult:
        scale = self._options.time_scale
        if flow.kind == "held":
            return await self._traffic.run_held(flow)
        if flow.kind == "http":
            return await web.run_http(self._senders, flow, scale)
        if flow.kind == "metrics":
            result, self._seen.metrics_text = await web.run_metrics(self._senders, flow, scale)
            return result
        if flow.kind == "cmd":
            status, output = await self._runner.shell(flow.command)
            return {"flow": flow.text, "cmd": {"rc": status, "output": output.strip().splitlines()}}
        return await self._traffic.run(flow)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
