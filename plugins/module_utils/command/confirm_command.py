# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``confirm``: keep the pending change, or have it reverted if a probe fails."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Sequence

from ..base.errors import HistoryError
from ..rollback.confirm import confirm, reject
from .result import OK, CommandResult

if TYPE_CHECKING:
    from ..convergence.probing.probe import ProbeResult


def confirm_change(arguments: argparse.Namespace) -> CommandResult:
    """Probe, then keep the pending change (``confirm``). If a probe fails, have it reverted and raise HistoryError."""
    results = _probed(arguments.probe, arguments.probe_timeout) if arguments.probe else []
    failed = [item for item in results if not item.answered]
    if failed:
        reasons = "; ".join(f"{item.probe}: {item.reason}" for item in failed)
        outcome = reject(arguments.state)
        raise HistoryError("; ".join(filter(None, (f"not confirmed because probes failed: {reasons}", outcome))))
    report = confirm(arguments.state, history_directory=arguments.history)
    lines = [f"{item.probe}: answers" for item in results]
    if report.changed:
        lines.append(f"the change after state {report.state} is kept; {report.remaining:g} seconds were left")
    else:
        lines.append("no change waits to be confirmed")
    document = {
        "state": report.state,
        "changed": report.changed,
        "remainingSeconds": report.remaining,
        "probes": [{**item._asdict(), "probe": str(item.probe)} for item in results],
    }
    return CommandResult(OK, lines, document, report.warnings)


def _probed(urls: Sequence[str], seconds: float) -> list[ProbeResult]:
    # Import probes only if needed: their imports take longer than a confirmation.
    from ..convergence.probing.attempts import parse_probe, run_probes

    return run_probes([parse_probe(url) for url in urls], seconds)
