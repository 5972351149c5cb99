# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the running agent is meant to serve, and how the kernel differs from that, asked over its control socket.

The cluster state that a check was given does not have the results of the agent's health checks, and may be older or
newer than what the agent has from the API server. The agent answers between its syncs, so its own comparison does not
depend on when the cluster changes.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Optional

from ..base.addresses import canonical_address
from ..cluster.model import Failing, NamespacedName
from ..cluster.state import Rising
from .request import TableChange
from .runtime.agent_client import ask_agent, reading_answer

QUESTION = "comparison"


class AgentComparison(NamedTuple):
    """The agent's answer.

    ``obstacle``: why the agent does not serve the current state of the cluster; empty if it does. ``settings``: the
    digest of its settings, see ``settings_digest``. ``failing`` and ``rising``: the endpoints that fail their health
    checks or are in slow start. ``excluded``: how many endpoints are not served because they fail. ``changes``: the
    tables in which the kernel differs from what the agent has programmed; None if the kernel was not read.
    """

    obstacle: str
    settings: str
    failing: Mapping[NamespacedName, Failing] = {}
    rising: Mapping[NamespacedName, Rising] = {}
    excluded: int = 0
    changes: Optional[tuple[TableChange, ...]] = None


def comparison_document(comparison: AgentComparison) -> dict[str, Any]:
    """Return a comparison as plain JSON values."""
    changes = comparison.changes
    return {
        "obstacle": comparison.obstacle,
        "settings": comparison.settings,
        "failing": [
            [*key, item.panic_threshold, [[*place, reason] for place, reason in item.reasons.items()]]
            for key, item in comparison.failing.items()
        ],
        "rising": [
            [*key, [[*place, eighths] for place, eighths in item.items()]] for key, item in comparison.rising.items()
        ],
        "excluded": comparison.excluded,
        "changes": None if changes is None else [change._asdict() for change in changes],
    }


def parse_comparison(document: Mapping[str, Any]) -> AgentComparison:
    """Return the comparison of :func:`comparison_document`. Raises ProxyError if the document is not one."""
    with reading_answer("what it serves"):
        changes = document["changes"]
        return AgentComparison(
            obstacle=str(document["obstacle"]),
            settings=str(document["settings"]),
            failing=dict(_failing(*row) for row in document["failing"]),
            rising=dict(_rising(*row) for row in document["rising"]),
            excluded=int(document["excluded"]),
            changes=None if changes is None else tuple(map(_change, changes)),
        )


def _place(address: Any, port: Any) -> tuple[str, int]:
    if canonical_address(str(address)) != address:
        raise ValueError(f"{address!r} is not an address")
    return address, int(port)


def _failing(namespace: Any, name: Any, panic: Any, places: Any) -> tuple[NamespacedName, Failing]:
    reasons = {_place(address, port): str(reason) for address, port, reason in places}
    return NamespacedName(str(namespace), str(name)), Failing(reasons, float(panic))


def _rising(namespace: Any, name: Any, places: Any) -> tuple[NamespacedName, Rising]:
    rising = {_place(address, port): int(eighths) for address, port, eighths in places}
    return NamespacedName(str(namespace), str(name)), rising


def _change(document: Mapping[str, Any]) -> TableChange:
    return TableChange(
        table=str(document["table"]),
        added=int(document["added"]),
        replaced=int(document["replaced"]),
        removed=int(document["removed"]),
        before=tuple(map(str, document["before"])),
        after=tuple(map(str, document["after"])),
        entries=tuple(map(str, document["entries"])),
        of_cluster=True,
    )


def ask_comparison(path: str, kernel: bool, describe: bool = False) -> AgentComparison:
    """Ask the agent that listens at ``path``; with ``kernel``, it reads the kernel, and with ``describe`` names lines.

    Raises NoAgent if no agent is running, ProxyError.
    """
    return parse_comparison(ask_agent(path, {"command": QUESTION, "kernel": kernel, "describe": describe}))
