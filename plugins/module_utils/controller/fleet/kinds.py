# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kinds of exceptions, most of which are states of a node as well: one row each, in the order of the report."""

from __future__ import annotations

from typing import Mapping, NamedTuple

UNREACHABLE = "unreachable"
FAILED = "failed"
AGENT = "agent"
DRIFTED = "drifted"
UNREACHED = "unreached"
STALE = "stale"
REFUSED = "refused"
WARNED = "warned"
POLICIES = "policies"
DIFFERS = "differs"
OK = "ok"

ERROR, WARNING, NOTICE = "error", "warning", "notice"


class Kind(NamedTuple):
    """A kind of exceptions, or the state of a node without one.

    ``letter``: beside each colour, for readers who cannot distinguish the colours, and for print. ``meaning``: below
    the title. ``nodes``: what a sentence calls the nodes in this state; empty for a kind that is no state.
    """

    title: str
    letter: str
    severity: str
    meaning: str
    nodes: str = ""


KINDS: Mapping[str, Kind] = {
    UNREACHABLE: Kind("Unreachable", "U", ERROR, "nodes that could not be connected to", "unreachable"),
    FAILED: Kind("Failed", "F", ERROR, "nodes that could not be inspected", "failed"),
    AGENT: Kind("Agent in trouble", "A", ERROR, "nodes whose agent is not healthy", "with an agent in trouble"),
    DRIFTED: Kind("Drifted", "D", ERROR, "nodes whose kernel differs from the cluster's state", "drifted"),
    UNREACHED: Kind(
        "Services not reached", "N", ERROR, "nodes from which a Service does not answer", "without a Service"
    ),
    STALE: Kind("Last sync long ago", "S", WARNING, "nodes that no longer follow the cluster", "synced long ago"),
    REFUSED: Kind(
        "Objects refused", "R", WARNING, "invalid objects of the cluster, which are skipped; all others are served"
    ),
    WARNED: Kind("Warnings", "W", WARNING, "warnings of nodes", "with warnings"),
    POLICIES: Kind(
        "Network policies", "P", NOTICE, "pods that no network policy selects, and policies that select no pod"
    ),
    DIFFERS: Kind(
        "Differs from the rest", "\u2260", NOTICE, "nodes with another mode or engine than most", "unlike the rest"
    ),
    OK: Kind("Fine", "\u00b7", NOTICE, "", "fine"),
}
#: The states of a node, worst first; the state of a node is the first that holds.
STATES: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if kind.nodes)
