# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The complete runs of the module ``service_proxy``, which need most of the engine."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Optional

from ..base.addresses import IPV4
from ..configuration.documents import Documents
from ..configuration.load import documents_in
from ..configuration.model import KubeProxyConfiguration
from ..configuration.validate import in_mode
from ..convergence.modes.choose import mode_without_node
from ..convergence.render import render
from ..convergence.request import Report, Request
from ..convergence.unchanged.inputs import Unusable, read_files
from ..rendering.build_settings import localhost_node_ports
from ..rollback.boot_state import BootSettings, NextBoot
from ..rollback.converged import converge
from ..serviceports.node import node_addresses
from .earlier import question
from .execution import warn, warning_lines
from .requests import engine_request
from .results import kernel_settings, refused_result, report_result, table_differences

if TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

    from ..convergence.unchanged.recorder import Recorder


def rendered(module: AnsibleModule) -> dict[str, Any]:
    """Return the result of ``state: rendered``, the text of everything that would be programmed."""
    request, warnings = engine_request(module, source="required")
    about_cluster: list[str] = []
    texts = render(request, about_cluster)
    refused, skipped = request.cluster.refusals, request.cluster.skipped
    warn(module, [*warnings, *about_cluster], refused, skipped)
    return {
        "changed": False,
        "mode": mode_without_node(request).name,
        "rendered": texts,
        **refused_result(refused, skipped),
    }


def _recorder(module: AnsibleModule) -> Optional[Recorder]:
    asked = question(module)
    if asked is None:
        return None
    from ..convergence.unchanged.recorder import Recorder

    return Recorder(asked)


def _unchanged(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the next run would return if nothing changes until then."""
    nothing = dict.fromkeys(("added", "replaced", "removed"), 0)
    own = {"changed": False, "changes": [], "conntrack_deleted": 0, "saved_state": None, "confirm_until": ""}
    kept = {name: value for name, value in result.items() if name != "diff"}
    return {**kept, **own, "counts": {**result["counts"], **nothing}}


def _kernel_settings(request: Request, report: Report) -> dict[str, Any]:
    """Return the kernel settings that the run has used; see :func:`.results.kernel_settings`."""
    configuration = in_mode(request.configuration, report.mode)
    own = node_addresses(request.cluster.nodes.get(report.node_name), configuration.bind_address)
    localhost = IPV4 in report.families and localhost_node_ports(configuration, own)
    return kernel_settings(configuration, report.ipvs_filter_backend, localhost)


def _next_boot(module: AnsibleModule) -> NextBoot:
    """Return what the options have for the next boot. Raises ConfigurationError."""
    options, source = module.params, ""
    if options["snapshot"] is not None:
        with contextlib.suppress(Unusable, OSError):
            source = read_files([options["snapshot"]], "").digests[options["snapshot"]]
    documents = Documents(options["configuration"] or {}, {})
    if options["config"] is not None:
        documents = documents_in(options["config"])
    node_configuration = options["node_configuration"] or documents.node_proxy
    return NextBoot(BootSettings(documents.kube_proxy, node_configuration, source=source), options["boot"])


def converged(module: AnsibleModule) -> dict[str, Any]:
    """Converge the node to the requested state and return the result."""
    recorder = _recorder(module)

    def configured(configuration: KubeProxyConfiguration) -> None:
        if recorder is not None:
            recorder.configured(configuration.node_proxy.static_services.directory)

    source = "required" if module.params["state"] == "present" else "unused"
    request, warnings = engine_request(module, source, configured)
    keep = module.params["keep_states"]
    if keep:
        request = request._replace(history_directory=module.params["history_directory"], keep_states=keep)
    request = request._replace(confirm_timeout=module.params["confirm_timeout"])
    keeps = request.state == "present" and not request.check
    report = converge(request, recorder, _next_boot(module) if keeps else None)
    lines = warning_lines([*warnings, *report.warnings], report.refused, report.skipped)
    for line in lines:
        module.warn(line)
    result = {
        "changed": report.changed,
        "conntrack_deleted": report.conntrack_deleted,
        "saved_state": report.saved_state,
        "confirm_until": report.confirm_until,
        "probes": list(report.probes),
        "observed": True,
        **report_result(report),
    }
    if request.state == "present":
        result["kernel"] = _kernel_settings(request, report)
    if request.describe:
        result["diff"] = table_differences(report.changes, module.params["diff_lines"])
    if recorder is not None:
        recorder.write(_unchanged(result), lines)
    return result
