# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inspection of a node by the module ``service_proxy_info``, also while an agent may follow the API server there.

A node differs from the state that was read for three reasons. Endpoints that fail the agent's health checks are
omitted on purpose, so they are omitted from the state as well. If the cluster has changed since, the agent serves
another state, and has compared the kernel with that one. Everything else is drift.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

from ..base.errors import ConfigurationError, ProxyError
from ..base.regular_files import SMALL, read_regular
from ..base.timestamps import timestamp
from ..cluster.state import ClusterState
from ..configuration.validate import in_mode
from ..convergence.agent_comparison import AgentComparison, ask_comparison
from ..convergence.probing.traffic import chosen_services, probe_targets
from ..convergence.report import change_counts
from ..convergence.request import Report, Request, TableChange
from ..convergence.runtime.agent_client import NoAgent
from ..convergence.runtime.ledger import booted_from
from ..convergence.runtime.state_directory import control_socket
from ..convergence.settings_digest import settings_digest
from ..kernel.facts import distribution, kernel_release
from ..packaging.identity import installed_identity
from ..preflight.processes import service_proxy_findings
from ..resources import Kind, label
from ..rollback.converged import inspect
from ..rollback.store import History
from .agent_state import agent_state
from .execution import warn
from .requests import engine_request
from .results import coverage_result, difference_lines, drift_summary, probe_records, report_result, table_differences
from .sources import has_source

# The role agent disables the timer when it takes over.
_SCHEDULE_ENABLED = "/etc/systemd/system/timers.target.wants/kubenode-proxy-schedule.timer"
_SCHEDULE_METRICS = "/var/lib/kubenode-proxy/schedule/kubenode_proxy_schedule.prom"
_SCHEDULE_SAMPLE = re.compile(r"^kubenode_proxy_schedule_(\w+) ([0-9]{1,11})(?:\.|$)", re.M | re.A)
#: How often the agent is asked until it finds no difference: it may be about to sync, or to open a watch again.
ATTEMPTS = 6
PAUSE_SECONDS = 1.0


class Inspection(NamedTuple):
    """The result of :func:`inspect_beside_agent`.

    ``report``: its changes are drift. ``newer``: the differences from the state that was given, if they are changes of
    the cluster that the agent knows. ``excluded``: how many endpoints the agent does not serve because they fail their
    health checks. ``problem``: why the agent's own comparison does not count, if there are differences that it could
    have explained.
    """

    report: Report
    newer: tuple[TableChange, ...] = ()
    excluded: int = 0
    problem: str = ""


def inspect_beside_agent(request: Request, sleep: Callable[[float], None] = time.sleep) -> Inspection:
    """Inspect the node, and distinguish drift from what a running agent does on purpose. Raises as ``inspect`` does.

    The cluster of the request gets the results of the agent's health checks.
    """
    path = control_socket(request.state_directory)
    agent, problem = _asked(path, kernel=False)
    if agent is not None:
        _adopt(request.cluster, agent)
    report = inspect(request)
    excluded = agent.excluded if agent is not None else 0
    of_cluster = tuple(change for change in report.changes if change.of_cluster)
    if agent is None or not of_cluster:
        return Inspection(report, excluded=excluded, problem=problem if of_cluster else "")
    configuration = in_mode(request.configuration, report.mode)
    backend, cluster = report.ipvs_filter_backend, request.cluster
    given = settings_digest(configuration, backend, report.node_name, report.families, cluster)
    for attempt in range(ATTEMPTS):
        if attempt:
            sleep(PAUSE_SECONDS)
        agent, problem = _asked(path, kernel=True, describe=request.describe)
        if agent is None:
            break
        problem = agent.obstacle
        if not problem and agent.settings != given:
            problem = "the agent has other settings than those that were given, or is of another version"
            break
        if not problem and not agent.changes:
            break
    if agent is None or problem:
        return Inspection(report, excluded=excluded, problem=problem)
    changes = (*(change for change in report.changes if not change.of_cluster), *(agent.changes or ()))
    counts = {**report.counts, **change_counts(changes)}
    return Inspection(
        report._replace(changes=changes, changed=bool(changes), counts=counts),
        newer=of_cluster,
        excluded=agent.excluded,
    )


def _asked(path: str, kernel: bool, describe: bool = False) -> tuple[Optional[AgentComparison], str]:
    """Return the agent's answer, or None and why there is none; that is empty if no agent runs."""
    try:
        return ask_comparison(path, kernel, describe), ""
    except NoAgent:
        return None, ""
    except ProxyError as error:
        return None, str(error)


def _adopt(cluster: ClusterState, agent: AgentComparison) -> None:
    for service, failing in agent.failing.items():
        if service in cluster.services:
            cluster.set_failing(service, failing)
    for service, rising in agent.rising.items():
        if service in cluster.services:
            cluster.set_rising(service, rising)


if TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

# Entries of these tables that the service proxy set cannot be distinguished from those of other programs.
SHARED = (label(Kind.MODULES), label(Kind.SYSCTLS))
COMPARED = (
    *("changes", "counts", "mode", "mode_reason"),
    *("refused", "refused_count", "refused_parts", "refused_parts_count"),
)


def about_node(module: AnsibleModule) -> dict[str, Any]:
    """Return the facts of the node that the result contains even if the inspection fails."""
    installed = installed_identity()
    return {
        "agent_version": installed.text if installed is not None else "",
        "agent": agent_state(module.params["state_directory"]),
        "booted_from": booted_from(module.params["state_directory"]),
        "schedule_failure": schedule_failure(),
        "kernel": kernel_release(),
        "distribution": distribution().name,
    }


def inspected(module: AnsibleModule) -> dict[str, Any]:
    """Return what is programmed and, with a source of the cluster state, how the node differs from it."""
    compare, traffic = has_source(module), module.params["traffic"]
    if traffic and not compare:
        raise ConfigurationError("traffic: needs the cluster state, from a snapshot or an API server")
    request, warnings = engine_request(module, source="optional")
    if traffic:
        request = request._replace(traffic=chosen_services(request.cluster, module.params["traffic_services"]))
    found = inspect_beside_agent(request) if compare else Inspection(inspect(request))
    report = found.report
    if found.problem:
        warnings = (*warnings, f"the node was compared only with the given cluster state: {found.problem}")
    warn(module, [*warnings, *report.warnings], report.refused, report.skipped)
    programmed = {table: count for table, count in report.programmed.items() if count and table not in SHARED}
    result = {
        "changed": False,
        "programmed": programmed,
        "cautions": list(dict.fromkeys([*warnings, *report.warnings])),
        **report_result(report),
    }
    if module.params["history_directory"] is not None:
        result["states"] = [item._asdict() for item in History(module.params["history_directory"]).list()]
    if not compare:
        return {key: value for key, value in result.items() if key not in COMPARED}
    if request.configuration.node_proxy.network_policy.enabled:
        result["network_policy"] = coverage_result(report)
    result["drift"] = report.changed
    result["summary"] = drift_summary(report.changes)
    result["newer"] = drift_summary(found.newer)
    result["excluded_endpoints"] = found.excluded
    result["other_proxies"] = [
        str(item)
        for item in service_proxy_findings(standalone=request.configuration.node_proxy.network_policy.standalone)
        if item.name not in request.ignore_findings
    ]
    if traffic:
        probed = probe_targets(report.targets, module.params["traffic_timeout"])
        result["traffic"] = [{**item._asdict(), "probes": probe_records(item.probes)} for item in probed]
        result["traffic_summary"] = "; ".join(
            f"{item.service} ({item.reason})" for item in probed if item.reached is False
        )
    if request.describe:
        result["diff"] = table_differences(report.changes, module.params["diff_lines"])
        result["difference"] = difference_lines(report.changes, module.params["diff_lines"])
    return result


def schedule_failure() -> str:
    """Return that the last scheduled run has failed, and since when; empty if it succeeded or nothing is scheduled."""
    if not os.path.lexists(_SCHEDULE_ENABLED):
        return ""
    try:
        found = _SCHEDULE_SAMPLE.findall(read_regular(_SCHEDULE_METRICS, SMALL).decode("ascii"))
    except (OSError, ValueError):
        return ""
    samples: dict[str, int] = {name: int(value) for name, value in found}
    if samples.get("success") != 0:
        return ""
    succeeded = samples.get("last_success_timestamp_seconds")
    since = "none has succeeded yet" if succeeded is None else f"none has succeeded since {timestamp(succeeded)}"
    return f"scheduled runs fail, {since}: see journalctl -u kubenode-proxy-schedule"
