# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inspection of a node by the module ``service_proxy_info``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

from ..base.errors import ConfigurationError
from ..convergence.probing.traffic import chosen_services, probe_targets
from ..kernel.facts import distribution, kernel_release
from ..packaging.identity import installed_identity
from ..preflight.processes import service_proxy_findings
from ..resources import Kind, label
from ..rollback.converged import inspect
from ..rollback.store import History
from .agent_state import agent_state
from .beside_agent import Inspection, inspect_beside_agent
from .execution import warn
from .requests import engine_request
from .results import coverage_result, difference_lines, drift_summary, probe_records, report_result, table_differences
from .sources import has_source

if TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

# Entries of these tables that the service proxy set cannot be distinguished from those of other programs.
SHARED = (label(Kind.MODULES), label(Kind.SYSCTLS))
COMPARED = (
    *("changes", "counts", "mode", "mode_reason"),
    *("refused", "refused_count", "refused_parts", "refused_parts_count"),
)


def about_node(module: AnsibleModule) -> Dict[str, Any]:
    """Return the facts of the node that the result contains even if the inspection fails."""
    installed = installed_identity()
    return {
        "agent_version": installed.text if installed is not None else "",
        "agent": agent_state(module.params["state_directory"], installed is not None),
        "kernel": kernel_release(),
        "distribution": distribution().name,
    }


def inspected(module: AnsibleModule) -> Dict[str, Any]:
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
        for item in service_proxy_findings()
        if item.name not in request.ignore_findings and not request.configuration.node_proxy.network_policy.standalone
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
