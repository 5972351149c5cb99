# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Record a proxy: the flows' outcomes, the state it programmed, and the objects as the API served them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from .cases import Case
from .controlplane import ControlPlane
from .execution import Execution, Observation
from .feeds import ControlPlaneFeed, Feed, RecordedFeed
from .objects import write_snapshots
from .options import RunOptions
from .running import save_observation


def record(
    cases: Sequence[Case],
    options: RunOptions,
    label: str,
    control_plane: ControlPlane | None,
    snapshots_only: bool = False,
) -> int:
    """Record the cases into their folders; returns how many could not be.

    With a control plane the objects pass through it, and snapshots.json is written; without, the built-in API serves
    those that are there. *snapshots_only* (needs a control plane): without running anything.
    """
    mode, failures, flows, start = options.runner.mode, 0, 0, time.monotonic()
    with ExitStack() as cleanup:
        if control_plane:
            control_plane.start()
            cleanup.callback(control_plane.stop)
        for case in cases:
            case_start = time.monotonic()
            try:
                if control_plane:
                    control_plane.wipe()
                if snapshots_only and control_plane:
                    count = _record_snapshots(case, control_plane)
                    _log(f"{case.name:<44} {count} snapshots")
                    continue
                seen = _observe(case, options, control_plane)
            except Exception as error:  # a case that cannot be recorded must not stop the others
                _log(f"{case.name:<44} FAILED: {error}")
                failures += 1
                continue
            save_observation(case.path, case.name, mode, seen, label=label)
            count = sum(len(step["flows"]) for step in seen.steps)
            flows += count
            _log(
                f"{case.name:<44} {count:>3} flows  {time.monotonic() - case_start:.1f}s"
                f"  sync {'/'.join(map(str, seen.sync_milliseconds))} ms"
            )
    _log(f"recorded {mode}: {flows} flows in {time.monotonic() - start:.0f}s, {failures} failures")
    return failures


def _observe(case: Case, options: RunOptions, control_plane: ControlPlane | None) -> Observation:
    async def execute() -> Observation:
        feed: Feed
        if not control_plane:
            feed = RecordedFeed(case.snapshots())
            return await Execution(case, options, feed).run()
        feed = ControlPlaneFeed(case, control_plane)
        seen = await Execution(case, options, feed).run()
        write_snapshots(case.file("snapshots.json"), feed.recorded)
        return seen

    return asyncio.run(execute())


def _record_snapshots(case: Case, control_plane: ControlPlane) -> int:
    feed = ControlPlaneFeed(case, control_plane)
    for number, step in enumerate(case.steps):
        feed.step(number, step)
    write_snapshots(case.file("snapshots.json"), feed.recorded)
    return len(feed.recorded)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
