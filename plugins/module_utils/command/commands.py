# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the node command does: each command takes its arguments and gives lines, a document and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Callable, Dict, List, NamedTuple, TextIO, Tuple

from ..agent.agent import Agent
from ..agent.options import AgentOptions, read_configuration
from ..agent.source.token import TokenKeeper
from ..agent.surface.control import NoAgent, ask_agent
from ..agent.surface.log import Log
from ..cluster.api import ApiClient, list_objects
from ..cluster.cache import read_cache
from ..cluster.connection import ApiConnection
from ..cluster.snapshot import read_snapshot
from ..cluster.state import ClusterState
from ..configuration.model import KubeProxyConfiguration
from ..configuration.validate import in_mode
from ..convergence.explain import desired_family, explain, explanation_document
from ..convergence.history.converged import converge, inspect
from ..convergence.modes.choose import choose_mode
from ..convergence.node import family_context, view_node
from ..convergence.request import Report, Request
from ..errors import ProxyError
from ..packaging.identity import identity

OK, FAILED, USAGE, DIFFERENT, NOT_RUNNING = 0, 1, 2, 3, 4


class Outcome(NamedTuple):
    """What a command has to say: lines for people, a document for programs, warnings, and its exit code."""

    code: int
    lines: List[str]
    document: Dict[str, Any]
    warnings: Tuple[str, ...] = ()


def version() -> str:
    """Return the version of the collection with the hash of the engine."""
    return f"kubenode-proxy {identity().text}"


def run_agent(arguments: argparse.Namespace, errors: TextIO) -> int:
    """Run the agent until it is stopped; returns its exit code. Raises ProxyError."""
    options = AgentOptions(
        configuration=arguments.config,
        kubeconfig=arguments.kubeconfig,
        node_name=arguments.node_name,
        mode=arguments.mode,
        fallback=arguments.fallback,
        state_directory=arguments.state_directory,
        cache=arguments.cache,
        control=arguments.control,
        token=arguments.token,
        ignore_findings=tuple(arguments.ignore),
        max_loss_percent=arguments.max_loss_percent,
        hold_loss=arguments.hold_loss,
        verbose=arguments.verbose,
        log_format=arguments.log_format,
    )
    # Where standard error goes to the journal, systemd says so in this variable.
    log = Log(errors, priorities="JOURNAL_STREAM" in os.environ)
    agent = Agent(options, log)
    agent.install_signals()
    log.info("starting", version=identity().text, process=os.getpid())
    try:
        return agent.run()
    except ProxyError as error:
        log.error("the agent cannot run", error=error)
        return FAILED


def _configuration(arguments: argparse.Namespace) -> Tuple[KubeProxyConfiguration, Tuple[str, ...]]:
    return read_configuration(AgentOptions(configuration=arguments.config, mode=arguments.mode))


def _cluster(arguments: argparse.Namespace, configuration: KubeProxyConfiguration) -> ClusterState:
    """The cluster state from where the arguments say: a snapshot, the agent's cache or the API server."""
    if arguments.snapshot:
        return ClusterState.from_objects(read_snapshot(arguments.snapshot))
    if arguments.from_cache:
        return ClusterState.from_objects(read_cache(arguments.cache).objects)
    kubeconfig = arguments.kubeconfig or configuration.client_connection.kubeconfig
    return ClusterState.from_objects(list_objects(ApiConnection(kubeconfig=kubeconfig or None)))


def _request(arguments: argparse.Namespace, cluster: ClusterState, configuration: KubeProxyConfiguration) -> Request:
    return Request(
        cluster=cluster,
        configuration=configuration,
        node_name=arguments.node_name,
        mode=arguments.mode,
        fallback=arguments.fallback,
        state_directory=arguments.state_directory,
        lock_timeout=arguments.lock_timeout,
        ignore_findings=tuple(arguments.ignore),
    )


def report_document(report: Report) -> Dict[str, Any]:
    """A report as plain JSON values."""
    return {
        "mode": report.mode,
        "modeReason": report.mode_reason,
        "node": report.node_name,
        "families": list(report.families),
        "changed": report.changed,
        "changes": [change._asdict() for change in report.changes],
        "counts": report.counts,
        "refused": [str(refusal) for refusal in report.refused],
        "skipped": [str(part) for part in report.skipped],
        "durations": {name: round(seconds, 6) for name, seconds in report.durations.items()},
        "conntrackDeleted": report.conntrack_deleted,
        "savedState": report.saved_state,
        "confirmUntil": report.confirm_until,
    }


def _report_lines(report: Report, checking: bool, with_entries: bool) -> List[str]:
    lines = []
    for change in report.changes:
        if with_entries:
            lines += [f"--- {change.table}", *(f"-{line}" for line in change.before)]
            lines += [f"+{line}" for line in change.after]
        else:
            lines.append(
                f"{change.table}: {change.added} to add, {change.replaced} to replace, {change.removed} to remove"
                if checking
                else f"{change.table}: {change.added} added, {change.replaced} replaced, {change.removed} removed"
            )
    if report.mode:
        counts = report.counts
        where = f"{counts['services']} Services, {counts['service_ports']} ports, {counts['endpoints']} endpoints"
        if counts["without_endpoints"]:
            where += f", {counts['without_endpoints']} Services without endpoints"
        lines.append(f"mode {report.mode} on {report.node_name}: {where}")
    if not report.changed:
        lines.append("nothing differs")
    if report.confirm_until:
        lines.append(
            f"to be confirmed by {report.confirm_until}, else the node goes back to state {report.saved_state}"
        )
    elif report.saved_state is not None:
        lines.append(f"the state before is saved as {report.saved_state}")
    return lines


def _converged(arguments: argparse.Namespace, check: bool, describe: bool, absent: bool = False) -> Outcome:
    configuration, warnings = _configuration(arguments)
    cluster = ClusterState() if absent else _cluster(arguments, configuration)
    request = _request(arguments, cluster, configuration)._replace(
        check=check,
        describe=describe,
        state="absent" if absent else "present",
        outside_host=getattr(arguments, "outside_host", False),
        max_loss_percent=getattr(arguments, "max_loss_percent", 100.0),
        unattended=getattr(arguments, "unattended", False),
    )
    report = converge(request if absent or "keep_states" not in arguments else _with_history(request, arguments))
    code = DIFFERENT if check and report.changed else OK
    refused = tuple(f"left out: {refusal}" for refusal in (*report.refused, *report.skipped))
    lines = _report_lines(report, check, describe)
    return Outcome(code, lines, report_document(report), (*warnings, *report.warnings, *refused))


def _with_history(request: Request, arguments: argparse.Namespace) -> Request:
    """The request with what the arguments say of saved states; only root may keep them."""
    keep = arguments.keep_states
    if keep is None:
        keep = 0 if os.geteuid() else request.keep_states
    if keep:
        request = request._replace(history_directory=arguments.history, keep_states=keep)
    return request._replace(confirm_timeout=arguments.confirm_timeout)


def converge_once(arguments: argparse.Namespace) -> Outcome:
    """``converge``: one convergence, or with --check only what it would do."""
    if not (arguments.check or arguments.snapshot or arguments.from_cache):
        _renew_own_token(arguments)
    return _converged(arguments, arguments.check, arguments.diff)


def _renew_own_token(arguments: argparse.Namespace) -> None:
    """Renew the token for the API server if it is due and belongs to this user: on a node without an agent.

    A failure is logged, and concerns the convergence only if the token has expired.
    """
    try:
        own = os.lstat(arguments.token).st_uid == os.geteuid()
    except OSError:
        return
    if own:
        kubeconfig = arguments.kubeconfig or _configuration(arguments)[0].client_connection.kubeconfig
        connection = ApiConnection(kubeconfig=kubeconfig or None)
        log = Log(sys.stderr, False, "JOURNAL_STREAM" in os.environ)
        TokenKeeper(arguments.token, lambda _expect: ApiClient(connection), log).step()


def show_diff(arguments: argparse.Namespace) -> Outcome:
    """``diff``: every entry that a convergence would change."""
    return _converged(arguments, check=True, describe=True)


def clean_up(arguments: argparse.Namespace) -> Outcome:
    """``cleanup``: take away all that any mode made."""
    return _converged(arguments, arguments.check, describe=False, absent=True)


def _status_lines(document: Dict[str, Any]) -> List[str]:
    healthy = "healthy" if document["healthy"] else "not healthy"
    lost = document.get("apiServerLostSeconds", {})
    if lost and all(lost.values()):
        healthy += f", without the API server for {min(lost.values()):.0f} s"
    lines = [
        f"agent:      running for {document['uptimeSeconds']:.0f} s, {healthy}",
        f"node:       {document['node']}",
        f"mode:       {document['mode'] or 'not chosen yet'} ({document['modeReason'] or 'waiting for the cluster'})",
    ]
    for name, state in document["apiServer"].items():
        seconds = f" (for {lost[name]:.0f} s)" if lost.get(name) else ""
        lines.append(f"API server: {name}: {state}{seconds}")
    for family, item in document["families"].items():
        text = f"{item['services']} Services, {item['ports']} ports, {item['endpoints']} endpoints"
        draining = f", {item['draining']} draining" if item["draining"] else ""
        lines.append(f"{family}:       {text}{draining}")
        entries = ", ".join(f"{count} {table}" for table, count in item["entries"].items() if count)
        lines.append(f"            {entries}")
    lines.append(f"syncs:      {document['syncs']}, foreign changes repaired: {document['driftRepaired']}")
    if document["lastError"]:
        lines.append(f"last error: {document['lastError']}")
    lines += [f"left out:   {refusal}" for refusal in document["refused"]]
    lines += [f"conflict:   {conflict}" for conflict in document.get("conflicts", ())]
    return lines


def show_status(arguments: argparse.Namespace) -> Outcome:
    """``status``: of the agent; without one, how the node compares with the cluster."""
    try:
        document = ask_agent(arguments.control, {"command": "status"})
    except NoAgent as error:
        return _status_without_agent(arguments, str(error))
    lines = _lines_of(_status_lines, document)
    good = document["healthy"] and not document["lastError"]
    return Outcome(OK if good else NOT_RUNNING, lines, document)


def _lines_of(show: Callable[[Dict[str, Any]], List[str]], document: Dict[str, Any]) -> List[str]:
    """Return the lines for an agent's answer. Raises ProxyError if it is not what an agent of this version answers."""
    try:
        return show(document)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ProxyError(f"the agent's answer is not valid: {type(error).__name__}: {error}") from error


def _status_without_agent(arguments: argparse.Namespace, reason: str) -> Outcome:
    lines = [f"agent:      not running ({reason})"]
    document: Dict[str, Any] = {"agent": "not running", "reason": reason}
    try:
        configuration, warnings = _configuration(arguments)
        report = inspect(_request(arguments, _cluster(arguments, configuration), configuration))
    except ProxyError as error:
        lines.append(f"node:       cannot be compared: {error}")
        return Outcome(NOT_RUNNING, lines, {**document, "error": str(error)})
    entries = ", ".join(f"{count} {table}" for table, count in report.programmed.items() if count)
    lines += [f"programmed: {entries or 'nothing'}", *_report_lines(report, checking=True, with_entries=False)]
    document.update(report_document(report), programmed=report.programmed)
    return Outcome(NOT_RUNNING, lines, document, (*warnings, *report.warnings))


def show_explanation(arguments: argparse.Namespace) -> Outcome:
    """``explain``: by the agent's view of the cluster, or without one from where the arguments say."""
    target = arguments.target
    try:
        if arguments.snapshot or arguments.from_cache:
            raise NoAgent("another source is asked for")
        document = ask_agent(arguments.control, {"command": "explain", "destination": str(target)})
    except NoAgent:
        configuration, _warnings = _configuration(arguments)
        cluster = _cluster(arguments, configuration)
        request = _request(arguments, cluster, configuration)
        mode = choose_mode(request).mode
        configuration = in_mode(configuration, mode.name)
        view = view_node(request, configuration, mode)
        contexts = [family_context(cluster, configuration, view, family) for family in view.families]
        families = [desired_family(cluster, mode.rendering, context) for context in contexts]
        document = explanation_document(explain(cluster, families, mode.name, target))
    lines = _lines_of(_explanation_lines, document)
    return Outcome(OK if document["found"] else DIFFERENT, lines, document)


def _explanation_lines(document: Dict[str, Any]) -> List[str]:
    where = f"node {document['node']}" + (f" in zone {document['zone']}" if document["zone"] else "")
    lines = [f"{document['destination']} on {where}, mode {document['mode']}:"]
    if not document["found"]:
        return [*lines, "  no Service answers here; the packet is left alone"]
    shown: List[str] = []
    for item in document["found"]:
        lines.append(f"  Service {item['service']}, port {item['port']}, by its {item['via']}")
        lines.append(f"    at {', '.join(item['frontends'])}")
        lines.append(f"    {item['outcome']}; {item['traffic']} traffic, policy {item['trafficPolicy']}")
        lines.append(f"    source address: {item['source']}")
        if item["affinitySeconds"]:
            lines.append(f"    a client stays with its endpoint for {item['affinitySeconds']} s")
        if item["sourceRanges"]:
            lines.append(f"    only from {', '.join(item['sourceRanges'])}")
        lines.append("    endpoints:" if item["endpoints"] else "    endpoints: none")
        for verdict in item["endpoints"]:
            lines.append(f"      {'yes' if verdict['chosen'] else 'no '} {verdict['endpoint']}: {verdict['reason']}")
        again = item["programmed"] == shown
        lines.append("    programmed: as above" if again else "    programmed:")
        lines += [] if again else [f"      {line}" for line in item["programmed"]]
        shown = item["programmed"]
    return lines
