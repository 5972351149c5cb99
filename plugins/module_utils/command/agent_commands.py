# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``status`` and ``explain``, which without an agent compare the node with the cluster, and ``reload``."""

from __future__ import annotations

import argparse
import time
from typing import Any, Optional

from ..base.errors import ProxyError, UnknownDestination, some_of
from ..convergence.runtime.agent_client import RELOAD, AgentBusy, NoAgent, ask_agent
from ..convergence.runtime.agent_status import AgentStatus, MemoryStatus, PolicyStatus, ask_status
from ..explain.target import ServiceTarget
from .connection_lines import PASSING, connection_lines, follow_flows, traced_lines
from .result import DIFFERENT, NOT_RUNNING, OK, CommandResult, Refused, drain_line, valid

#: The maximum number of names in one line of the status; --output json has all of them.
_NAMES = 10
#: After this time a busy agent is not asked to reload again: one answer less than TimeoutStartSec of the unit, 120 s.
RELOAD_SECONDS = 60.0


def show_status(arguments: argparse.Namespace) -> CommandResult:
    """Show the agent's status, or without one how the node differs from the cluster (``status``)."""
    try:
        document = ask_status(arguments.control)
    except NoAgent as error:
        from .commands import status_without_agent

        return status_without_agent(arguments, str(error))
    lines = valid(lambda: _status_lines(document))
    errors = (document["lastError"], document.get("reloadError"), document.get("networkPolicy", {}).get("error"))
    good = document["healthy"] and document["mode"] and not any(errors)
    return CommandResult(OK if good else NOT_RUNNING, lines, dict(document))


def reload_agent(arguments: argparse.Namespace) -> CommandResult:
    """Make the agent read its configuration again (``reload``), and wait for the result.

    An agent that is busy is asked again, which does no harm: it reads the same file. Raises ProxyError with the reason
    if the agent keeps its previous configuration or stays busy, Refused if no agent is running.
    """
    end = time.monotonic() + RELOAD_SECONDS
    while True:
        try:
            document = ask_agent(arguments.control, {"command": RELOAD})
            break
        except NoAgent as error:
            raise Refused(NOT_RUNNING, str(error)) from error
        except AgentBusy as error:
            if time.monotonic() > end:
                raise ProxyError(f"{error}; it reads its configuration as soon as it can") from error
    line = valid(lambda: [f"the configuration is in effect: node {document['node']}, mode {document['mode']}"])
    return CommandResult(OK, line, document, tuple(document.get("warnings", ())))


def _status_lines(document: AgentStatus) -> list[str]:
    healthy = "not healthy" if not document["healthy"] else "healthy" if document["mode"] else "waits for the cluster"
    if document.get("otherProxy"):
        healthy += f": {document['otherProxy']}"
    lost = document.get("apiServerLostSeconds", {})
    if lost and all(lost.values()):
        healthy += f", without the API server for {min(lost.values()):.0f} s"
    mode, filter_backend = document["mode"] or "not chosen yet", document.get("ipvsFilterBackend")
    with_filter_backend = f", filter backend {filter_backend}" if filter_backend else ""
    lines = [
        f"agent:      running for {document['uptimeSeconds']:.0f} s, {healthy}",
        f"node:       {document['node']}",
        f"mode:       {mode}{with_filter_backend} ({document['modeReason'] or 'waiting for the cluster'})",
        f"behaviour:  {document['behaviour']}",
    ]
    servers = document.get("apiServers", ())
    for server in servers if len(servers) > 1 else ():
        state = "in use" if server["inUse"] else "known"
        error = f", last error: {server['lastError']}" if server["lastError"] else ""
        lines.append(f"API server: {server['server']}: {state}, named by the {server['from']}{error}")
    for name, state in document["apiServer"].items():
        seconds = f" (for {lost[name]:.0f} s)" if lost.get(name) else ""
        lines.append(f"API server: {name}: {state}{seconds}")
    drained = document.get("drain") or {}
    if drained.get("drained") or drained.get("problem"):
        lines.insert(1, f"drain:      {drain_line(drained)}")
    for family, item in document["families"].items():
        text = f"{item['services']} Services, {item['ports']} ports, {item['endpoints']} endpoints"
        draining = f", {item['draining']} draining" if item["draining"] else ""
        lines.append(f"{family}:       {text}{draining}")
        entries = ", ".join(f"{count} {table}" for table, count in item["entries"].items() if count)
        lines.append(f"            {entries}")
    forwarding = document.get("forwarding")
    if forwarding:
        text = f"{forwarding['connections']} connections, {forwarding['sessions']} UDP sessions"
        lines.append(f"forwarding: {text}, {forwarding['sockets']} of {forwarding['listeners']} listeners open")
        lines += [f"            cannot listen: {line}" for line in forwarding["unbound"]]
    lines += _policy_lines(document.get("networkPolicy") or {})
    lines += _memory_lines(document.get("memory"))
    lines.append(f"syncs:      {document['syncs']}, external changes repaired: {document['driftRepaired']}")
    if document["lastError"]:
        lines.append(f"last error: {document['lastError']}")
    if document.get("reloadError"):
        lines.append(f"reload:     failed, the previous configuration is in effect: {document['reloadError']}")
    for check in document.get("checks", ()):
        state = "passing" if check["passing"] else "failing"
        error = f", last error: {check['lastError']}" if check["lastError"] else ""
        count = f"{check['failures']} failed in a row" if check["failures"] else f"{check['checks']} checks"
        lines.append(f"check:      {check['service']} {check['endpoint']}: {state} ({count}{error})")
    lines += [f"port:       {line}, retrying" for line in document.get("closedPorts", ())]
    lines += [f"caution:    {line}" for line in document.get("ignored", ())]
    lines += [f"unchecked:  {line}" for line in document.get("unchecked", ())]
    lines += _named("skipped:    ", document["refused"], document.get("refusedCount", 0))
    lines += _named("failed:     ", document.get("failed", []), document.get("failedCount", 0))
    lines += _named("conflict:   ", document.get("conflicts", []), document.get("conflictCount", 0))
    return lines


def _named(head: str, items: list[str], count: int) -> list[str]:
    """Return a line for each item, and one that says how many more there are."""
    more = [f"            and {count - len(items)} more"] if count > len(items) else []
    return [f"{head}{item}" for item in items] + more


def _memory_lines(memory: Optional[MemoryStatus]) -> list[str]:
    if not memory or not memory.get("limit"):
        return []
    percent = round(memory["cluster"] * 100 / memory["capacity"]) if memory["capacity"] else 100
    text = f"{memory['used'] >> 20} of {memory['limit'] >> 20} MiB, cluster uses {percent} % of its budget"
    lines = [f"memory:     {text}"]
    if memory["refusedLists"]:
        lines.append(f"            too large to be listed: {', '.join(memory['refusedLists'])}")
    if memory["heldBack"]:
        lines.append(f"            {memory['heldBack']} objects keep their previous version")
    return lines


def _policy_lines(policy: PolicyStatus) -> list[str]:
    if not policy:
        return []
    state = "in force" if policy["inForce"] else "not up to date"
    counts = f"{policy['policies']} policies, {policy['pods']} pods, {policy['elements']} elements"
    repaired = f", external changes repaired: {policy['repaired']}" if policy["repaired"] else ""
    lines = [f"policies:   {state}: {counts}{repaired}"]
    if policy["error"]:
        lines.append(f"            {policy['error']}")
    for names, text in (
        (policy.get("unselectedPods", []), "pods that no policy selects"),
        (policy.get("unusedPolicies", []), "policies without a pod"),
    ):
        if names:
            lines.append(f"            {text}: {some_of(names, _NAMES)}")
    return [*lines, *(f"            {line}" for line in policy["warnings"])]


def show_explanation(arguments: argparse.Namespace) -> CommandResult:
    """Explain a Service or a connection by the agent's view of the cluster, or that of the options (``explain``)."""
    if arguments.destination is not None:
        return _connection(arguments)
    client = arguments.source.address if arguments.source else ""
    try:
        if arguments.snapshot or arguments.from_cache:
            raise NoAgent("the options name another source")
        question = {"command": "explain", "destination": str(arguments.target), "client": client}
        question["kernel"] = not arguments.no_kernel
        document = ask_agent(arguments.control, question)
    except NoAgent:
        from .commands import explain_node

        document = explain_node(arguments, arguments.target, client)
    if not document["found"] and not document["leftToPrograms"] and isinstance(arguments.target, ServiceTarget):
        from .absent_service import why_absent

        document["reason"] = why_absent(arguments, arguments.target.namespace, arguments.target.name)
    lines = valid(lambda: _explanation_lines(document))
    # An agent of another version does not say how the kernel differs.
    good = document["found"] and not any(item.get("differences") for item in document["found"])
    warnings = (f"the kernel was not read: {document['problem']}",) if document.get("problem") else ()
    return CommandResult(OK if good else DIFFERENT, lines, document, warnings)


def _connection(arguments: argparse.Namespace) -> CommandResult:
    """Explain a connection: where it leads, what the kernel holds for it, and whether network policies allow it."""
    try:
        document = _connection_document(arguments)
    except UnknownDestination as error:
        from .absent_service import why_absent

        end = arguments.destination
        raise ProxyError(f"{error}: {why_absent(arguments, end.namespace, end.name)}") from error
    lines = valid(lambda: connection_lines(document, arguments.why_not))
    if arguments.live is not None:
        follow_flows(document, arguments.live)
        lines += traced_lines(document, arguments.live)
    good = document["allowed"] and not document.get("differences")
    good = good and all(flow["verdict"] in PASSING for flow in document.get("flows", ()))
    problems = document.get("problems")
    warnings = tuple(map(str, problems)) if isinstance(problems, list) else ()
    return CommandResult(OK if good else DIFFERENT, lines, document, warnings)


def _connection_document(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the agent's explanation of a connection, or without an agent that of the options. Raises ProxyError."""
    ends = {"from": str(arguments.source), "to": str(arguments.destination), "kernel": not arguments.no_kernel}
    try:
        if arguments.snapshot or arguments.from_cache:
            raise NoAgent("the options name another source")
        return ask_agent(arguments.control, {"command": "explain", **ends})
    except NoAgent:
        from .commands import explain_connection

        return explain_connection(arguments)


def _explanation_lines(document: dict[str, Any]) -> list[str]:
    where = f"node {document['node']}" + (f" in zone {document['zone']}" if document["zone"] else "")
    lines = [f"{document['destination']} on {where}, mode {document['mode']}, behaviour {document['behaviour']}:"]
    if document["leftToPrograms"]:
        return [*lines, f"  left to a program on this node: Service {', '.join(document['leftToPrograms'])}"]
    lines += [f"  refused: {reason}" for reason in document["refused"]]
    if not document["found"]:
        reason = document.get("reason") or "no Service has this destination; the packet is not changed"
        return [*lines, f"  {reason}"]
    shown: list[str] = []
    for item in document["found"]:
        lines.append(f"  Service {item['service']}, port {item['port']}, by its {item['via']}")
        lines.append(f"    at {', '.join(item['frontends'])}")
        lines.append(f"    {item['outcome']}; {item['traffic']} traffic, policy {item['trafficPolicy']}")
        if document["client"]:
            reached = item["clientEndpoint"] or "not determined by its address"
            lines.append(f"    client {document['client']}: {reached}")
        lines.append(f"    source address: {item['source']}")
        if item["affinitySeconds"]:
            lines.append(f"    session affinity: {item['affinitySeconds']} s")
        if item["sourceRanges"]:
            lines.append(f"    only from {', '.join(item['sourceRanges'])}")
        lines.append("    endpoints:" if item["endpoints"] else "    endpoints: none")
        for verdict in item["endpoints"]:
            lines.append(f"      {'yes' if verdict['chosen'] else 'no '} {verdict['endpoint']}: {verdict['reason']}")
        if item.get("differences"):
            # Not wrapped, so that it can be pasted.
            lines += ["    differs:", *(f"      {line}" for line in item["differences"])]
        again = item["programmed"] == shown
        heading = "programmed" if document.get("kernelRead") and not item.get("differences") else "desired"
        lines.append(f"    {heading}:{' as above' if again else ''}")
        lines += [] if again else [f"      {line}" for line in item["programmed"]]
        shown = item["programmed"]
    return lines
