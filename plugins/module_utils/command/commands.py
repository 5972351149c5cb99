# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The commands that work without an agent: they read the cluster and the kernel."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from typing import Any, Callable, Iterable, NamedTuple, Sequence

from ..base.errors import ProxyError
from ..base.mode_names import AUTO
from ..cluster.api.access.names import with_addresses
from ..cluster.api.client import ApiClient
from ..cluster.api.connection import ApiConnection, resolve
from ..cluster.api_addresses import claims_at
from ..cluster.claims import Claim
from ..cluster.files.cache import read_cache
from ..cluster.files.snapshot import snapshot_objects
from ..cluster.files.static import StaticDirectory
from ..cluster.state import ClusterState
from ..configuration.documents import Documents
from ..configuration.load import documents_in, load_given
from ..configuration.model import KubeProxyConfiguration
from ..configuration.validate import in_mode
from ..convergence.family import FamilyTables
from ..convergence.handles import KernelHandles
from ..convergence.modes.choose import choose_mode
from ..convergence.modes.mode import Mode
from ..convergence.node import NodeView, view_node
from ..convergence.policy import find_links, node_policy, policy_options
from ..convergence.prepare import check_cluster
from ..convergence.request import Report, Request
from ..convergence.runtime.lock import ConvergenceLock
from ..explain.connection import Subject, connection_document
from ..explain.explain import ExplainedFamily, Stages, explain, explained_families, explanation_document
from ..explain.flows import Kernel
from ..explain.policy import PolicyExplainer, Resolved
from ..explain.target import Target
from ..resources import Stage
from ..rollback.boot_state import BootSettings, NextBoot
from ..rollback.converged import converge, inspect
from .result import DIFFERENT, NOT_RUNNING, OK, CommandResult, change_lines


class _Cluster(NamedTuple):
    """The cluster with the static Services, a function that returns its raw objects, and warnings about its source."""

    state: ClusterState
    objects: Callable[[], Iterable[Any]]
    warnings: tuple[str, ...]


def _cluster(arguments: argparse.Namespace, configuration: KubeProxyConfiguration) -> _Cluster:
    """Return the cluster from the source in the arguments: snapshot, cache or API servers."""
    warnings: tuple[str, ...] = ()
    objects: Callable[[], Iterable[Any]]
    if arguments.snapshot:
        objects = functools.partial(snapshot_objects, arguments.snapshot)
    elif arguments.from_cache:
        objects = functools.partial(read_cache, arguments.cache)
    else:
        # Only this source needs what knows several API servers.
        from .cluster_source import Sources, read_objects

        kubeconfig = arguments.kubeconfig or configuration.client_connection.kubeconfig
        sources = Sources(kubeconfig, configuration.node_proxy.api_servers, arguments.cache)
        found, warnings = read_objects(sources, configuration.node_proxy.network_policy.resources)
        objects = functools.partial(iter, found)
    state = ClusterState.from_objects(objects())
    state.set_api_servers(_api_servers(arguments, configuration))
    state.set_static(StaticDirectory(configuration.node_proxy.static_services.directory).read())
    return _Cluster(state, objects, warnings)


def _api_servers(arguments: argparse.Namespace, configuration: KubeProxyConfiguration) -> frozenset[Claim]:
    """Return the addresses of the API servers that an agent of this node is given."""
    servers = list(configuration.node_proxy.api_servers.alternatives)
    kubeconfig = arguments.kubeconfig or configuration.client_connection.kubeconfig
    if kubeconfig or not (arguments.snapshot or arguments.from_cache):
        with contextlib.suppress(ProxyError):
            # A snapshot or cache is used without access to the API server, too.
            servers.append(resolve(ApiConnection(kubeconfig=kubeconfig or None)).address()[1:])
    return claims_at(with_addresses(servers))


def _request(arguments: argparse.Namespace) -> tuple[Request, tuple[str, ...]]:
    """Return the request for the arguments, and warnings about the configuration and the source of the cluster."""
    configuration, warnings = load_given(arguments.config, arguments.mode)
    cluster = _cluster(arguments, configuration)
    request = Request(
        cluster=cluster.state,
        configuration=configuration,
        objects=cluster.objects,
        node_name=arguments.node_name,
        mode=arguments.mode,
        fallback=arguments.fallback,
        state_directory=arguments.state_directory,
        ignore_findings=tuple(arguments.ignore),
        outside_host=arguments.outside_host,
    )
    return request, (*warnings, *cluster.warnings)


def report_document(report: Report) -> dict[str, Any]:
    """Return a report as plain JSON values."""
    return {
        "mode": report.mode,
        "modeReason": report.mode_reason,
        "behaviour": report.behaviour,
        "ipvsFilterBackend": report.ipvs_filter_backend,
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


def _report_lines(report: Report, checking: bool, with_entries: bool) -> list[str]:
    lines = change_lines(report.changes, checking, with_entries)
    mode = f"{report.mode}, filter backend {report.ipvs_filter_backend}," if report.ipvs_filter_backend else report.mode
    if report.mode and not report.families:
        lines.append(f"mode {mode} on {report.node_name}: {report.mode_reason}")
    elif report.mode:
        counts = report.counts
        where = f"{counts['services']} Services, {counts['service_ports']} ports, {counts['endpoints']} endpoints"
        if counts["without_endpoints"]:
            where += f", {counts['without_endpoints']} Services without endpoints"
        lines.append(f"mode {mode} on {report.node_name}: {where}")
    if not report.changed:
        lines.append("no differences")
    if report.confirm_until:
        lines.append(f"confirm by {report.confirm_until}, else the node rolls back to state {report.saved_state}")
    elif report.saved_state is not None:
        lines.append(f"saved the previous state as {report.saved_state}")
    return lines


def _result(request: Request, report: Report, warnings: Sequence[str]) -> CommandResult:
    """Return the result of a convergence or a comparison; the ``warnings`` precede the report's."""
    code = DIFFERENT if request.check and report.changed else OK
    refused = tuple(f"skipped: {refusal}" for refusal in (*report.refused, *report.skipped))
    lines = _report_lines(report, request.check, request.describe)
    return CommandResult(code, lines, report_document(report), (*warnings, *report.warnings, *refused))


def _with_history(request: Request, arguments: argparse.Namespace) -> Request:
    """Return the request with the arguments about saved states; only root can save them."""
    keep = arguments.keep_states
    if keep is None:
        keep = 0 if os.geteuid() else request.keep_states
    if keep:
        request = request._replace(history_directory=arguments.history, keep_states=keep)
    return request._replace(confirm_timeout=arguments.confirm_timeout)


def converge_once(arguments: argparse.Namespace) -> CommandResult:
    """Converge the node once, or with --check report what would change (``converge``)."""
    if not (arguments.check or arguments.snapshot or arguments.from_cache):
        _renew_own_token(arguments)
    request, warnings = _request(arguments)
    request = request._replace(
        check=arguments.check,
        describe=arguments.diff,
        lock_timeout=arguments.lock_timeout,
        max_unserved_percent=arguments.max_unserved_percent,
        unattended=arguments.unattended,
    )
    request = _with_history(request, arguments)
    if request.check:
        ConvergenceLock(request.state_directory, 0.0).refuse_agent()
    documents = documents_in(arguments.config) if arguments.config else Documents({}, {})
    next_boot = NextBoot(BootSettings(documents.kube_proxy, documents.node_proxy), None)
    return _result(request, converge(request, next_boot=next_boot), warnings)


def _renew_own_token(arguments: argparse.Namespace) -> None:
    """Renew the token for the API server if it is due and belongs to this user, for nodes without an agent.

    A failure is logged; the convergence fails only if the token has expired.
    """
    try:
        own = os.lstat(arguments.token).st_uid == os.geteuid()
    except OSError:
        return
    if own:
        from ..base.log import Log
        from ..cluster.api.access.token_renewal import TokenRenewal

        configuration = load_given(arguments.config, arguments.mode).configuration
        kubeconfig = arguments.kubeconfig or configuration.client_connection.kubeconfig
        connection = ApiConnection(kubeconfig=kubeconfig or None)
        log = Log(sys.stderr, False, "JOURNAL_STREAM" in os.environ)
        TokenRenewal(arguments.token, lambda _expect: ApiClient(connection), log).step()


def show_diff(arguments: argparse.Namespace) -> CommandResult:
    """Show every entry that a convergence would change (``diff``)."""
    request, warnings = _request(arguments)
    request = request._replace(check=True, describe=True)
    return _result(request, inspect(request), warnings)


def clean_up(arguments: argparse.Namespace) -> CommandResult:
    """Remove everything that any mode programmed; where only policies are enforced, only their table (``cleanup``)."""
    loaded = load_given(arguments.config, AUTO)
    request = Request(
        cluster=ClusterState(),
        configuration=loaded.configuration,
        state="absent",
        check=arguments.check,
        state_directory=arguments.state_directory,
        lock_timeout=arguments.lock_timeout,
        ignore_findings=tuple(arguments.ignore),
    )
    return _result(request, converge(request), loaded.warnings)


def status_without_agent(arguments: argparse.Namespace, reason: str) -> CommandResult:
    """Show what is programmed on a node without an agent, and how it differs from the cluster (``status``)."""
    lines = [f"agent:      not running ({reason})"]
    document: dict[str, Any] = {"agent": "not running", "reason": reason}
    try:
        request, warnings = _request(arguments)
        report = inspect(request)
    except ProxyError as error:
        lines.append(f"node:       cannot be compared: {error}")
        return CommandResult(NOT_RUNNING, lines, {**document, "error": str(error)})
    entries = ", ".join(f"{count} {table}" for table, count in report.programmed.items() if count)
    lines += [f"programmed: {entries or 'nothing'}", *_report_lines(report, checking=True, with_entries=False)]
    document.update(report_document(report), programmed=report.programmed)
    return CommandResult(NOT_RUNNING, lines, document, (*warnings, *report.warnings))


class _Node(NamedTuple):
    """The data for explanations without an agent."""

    cluster: ClusterState
    configuration: KubeProxyConfiguration
    view: NodeView
    mode: Mode
    families: list[ExplainedFamily]


def _node(arguments: argparse.Namespace) -> _Node:
    request, _warnings = _request(arguments)
    cluster = request.cluster
    mode = choose_mode(request._replace(check=True)).mode
    configuration = in_mode(request.configuration, mode.name)
    view = view_node(request, configuration, mode)
    check_cluster(request, view)
    families = explained_families(cluster, configuration, view, mode)
    return _Node(cluster, configuration, view, mode, families)


def explain_node(arguments: argparse.Namespace, target: Target, client: str) -> dict[str, Any]:
    """Return the explanation of a target by the desired state of this node. Raises ProxyError.

    ``client``: the address of a client, or empty.
    """
    node = _node(arguments)
    with KernelHandles(loads=False) as handles:
        stages = None if arguments.no_kernel or not node.mode.serves else _stages_of(node, handles)
        found = explain(node.cluster, node.families, node.mode.name, target, client=client, stages=stages)
        return explanation_document(found)


def _stages_of(node: _Node, handles: KernelHandles) -> Stages:
    """Return what gives the kernel's resources of a family with the tables that this node should have."""

    def stages(family: ExplainedFamily) -> list[Stage]:
        tables = FamilyTables(family.context, family.tables.desired)
        return node.mode.stages(node.configuration, [tables], handles)

    return stages


def explain_connection(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the explanation of a connection, without an agent. Raises ProxyError."""
    node = _node(arguments)
    settings = node.configuration.node_proxy.network_policy
    policy = node_policy(node.cluster, settings, node.view.name, node.view.addresses)
    if settings.enabled and not arguments.no_kernel:
        find_links(policy, settings)

    def policies(endpoints: Sequence[Resolved]) -> PolicyExplainer:
        return PolicyExplainer(
            node.cluster,
            policy,
            node_name=node.view.name,
            node_addresses=[address for _interface, address in node.view.addresses],
            options=policy_options(settings),
            endpoints=endpoints,
        )

    with KernelHandles(loads=False) as handles:
        kernel = None if arguments.no_kernel else Kernel(handles, _stages_of(node, handles))
        known = settings.enabled or node.cluster.policy.pods or not node.mode.serves
        subject = Subject(
            state=node.cluster,
            families=node.families,
            mode=node.mode,
            node=node.view.name,
            kernel=kernel,
            policies=policies if known else None,
        )
        return connection_document(subject, arguments.source, arguments.destination)
