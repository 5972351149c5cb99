# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The variables that playbooks read themselves, which have no argument specification.

tests/unit/documentation/test_playbook_variables.py compares them with the playbooks.
"""

from __future__ import annotations

from typing import NamedTuple


class PlaybookVariable(NamedTuple):
    """A variable; ``default`` is its default as text, or empty if there is none, in words unless it is ``literal``."""

    name: str
    playbooks: tuple[str, ...]
    default: str
    text: str
    literal: bool = True


_ALL = ("agent", "cleanup", "converge", "drain", "explain", "migrate", "report", "rollback", "verify")
_AT_ONCE = tuple(name for name in _ALL if name not in ("drain", "migrate"))

_REMOVING = ("agent", "cleanup", "converge", "migrate")

VARIABLES = (
    PlaybookVariable("drain_agent_timeout", ("drain",), "300", "Seconds to wait for a healthy agent after the tasks."),
    PlaybookVariable(
        "drain_cut",
        ("drain",),
        "true",
        "Whether to continue at the deadline, which cuts the connections that are left. If not, the host fails.",
    ),
    PlaybookVariable(
        "drain_deadline", ("drain",), "5m", "How long to wait until no external connection is left on the host."
    ),
    PlaybookVariable("drain_for", ("drain",), "2h", "When the drain ends by itself."),
    PlaybookVariable("drain_quiet", ("drain",), "30s", "How long no new connection must begin."),
    PlaybookVariable(
        "drain_tasks",
        ("drain",),
        "",
        "**Required**, but not in check mode: a file with the tasks to run on each drained host, relative to the "
        "current directory.",
    ),
    PlaybookVariable(
        "drain_verify",
        ("drain",),
        "true",
        "Whether to compare the host with the cluster before its drain ends.",
    ),
    PlaybookVariable("explain_command", ("explain",), "/usr/local/bin/kubenode-proxy", "The node command."),
    PlaybookVariable(
        "explain_from",
        ("explain",),
        "",
        "**Required**: the client, as `ADDRESS`, `ADDRESS:PORT` or `NAMESPACE/POD`.",
    ),
    PlaybookVariable(
        "explain_to",
        ("explain",),
        "",
        "**Required**: the destination, as `ADDRESS:PORT[/PROTOCOL]` or `NAMESPACE/NAME:PORT`.",
    ),
    PlaybookVariable("migrate_agent", ("migrate",), "true", "Whether to install the agent."),
    PlaybookVariable(
        "migrate_configuration",
        ("migrate",),
        "compare",
        "`compare`: the hosts' configuration is compared with kube-proxy's ConfigMap, and a field that changes traffic "
        "and differs is an error if the hosts do not set it; `kube-proxy`: such fields are adopted; `own`: neither.",
    ),
    PlaybookVariable(
        "migrate_direction", ("migrate",), "forward", "`forward`, or `back` to give the hosts back to kube-proxy."
    ),
    PlaybookVariable(
        "migrate_kube_proxy_mode",
        ("migrate",),
        "",
        "The mode of kube-proxy, to which hosts are converged before they are given back; by default that of its "
        "ConfigMap. Required to give hosts back without one.",
    ),
    PlaybookVariable("migrate_kube_proxy_name", _REMOVING, "kube-proxy", "Name of kube-proxy's DaemonSet."),
    PlaybookVariable("migrate_kube_proxy_namespace", _REMOVING, "kube-system", "Its namespace."),
    PlaybookVariable(
        "migrate_label", _REMOVING, "kubenode.proxy/managed", "Label of Nodes that kube-proxy is kept off."
    ),
    PlaybookVariable(
        "migrate_manage_kube_proxy",
        ("migrate",),
        "true",
        "Whether to keep kube-proxy off the hosts through its DaemonSet. If not, stop and start it yourself.",
    ),
    PlaybookVariable(
        "migrate_probes",
        ("migrate",),
        "[]",
        "What must be reachable from each host after it is taken over or given back: a list of `host`, `port` and "
        "`timeout` (seconds).",
    ),
    PlaybookVariable(
        "migrate_remove_rule", ("migrate",), "false", "Whether to remove the rule from the DaemonSet after giving back."
    ),
    PlaybookVariable(
        "migrate_wait_timeout", ("migrate",), "300", "Seconds to wait until kube-proxy has stopped or started."
    ),
    PlaybookVariable(
        "proxy_hosts",
        _ALL,
        "k8s_cluster",
        "The hosts: the nodes of the cluster and no others. Required where the inventory has no group of this name.",
    ),
    PlaybookVariable(
        "proxy_max_fail_percentage",
        ("agent", "converge"),
        "100",
        "No further batch is started if more than this percentage of the hosts of a batch has failed. Whatever the "
        "percentage, a batch in which all hosts fail ends the rollout.",
    ),
    PlaybookVariable("proxy_max_fail_percentage", ("rollback",), "0", "The same."),
    PlaybookVariable(
        "proxy_prepare_kernel",
        ("agent", "converge", "migrate"),
        "true",
        "Whether to run the role `kernel` and to install packages.",
    ),
    PlaybookVariable(
        "proxy_report_html", ("report",), "fleet-report.html", "The page, relative to the current directory."
    ),
    PlaybookVariable(
        "proxy_report_json", ("report",), "fleet-report.json", "The JSON document, relative to the current directory."
    ),
    PlaybookVariable(
        "proxy_report_live",
        ("report",),
        "false",
        "Whether to read only what the agents report. Use it with `--forks 100`.",
    ),
    PlaybookVariable(
        "proxy_report_previous",
        ("report",),
        "the document that `proxy_report_json` replaces",
        "The JSON document of an earlier report, to show what has changed.",
        literal=False,
    ),
    PlaybookVariable(
        "proxy_report_stale_after", ("report",), "7200", "Age in seconds from which an agent's last sync is stale."
    ),
    PlaybookVariable("proxy_report_title", ("report",), "Service proxy fleet", "Title of the report."),
    PlaybookVariable("proxy_serial", _AT_ONCE, "100%", "Size of a batch of hosts, or a list of sizes."),
    PlaybookVariable(
        "proxy_serial",
        ("migrate",),
        "[1, '10%', '25%', '100%']",
        "The same. No further batch is started after one in which a host failed.",
    ),
    PlaybookVariable(
        "rollback_accept_loss",
        ("rollback",),
        "false",
        "Whether to restore a state in which nothing was programmed, or of whose endpoints more than half do not exist "
        "any more.",
    ),
    PlaybookVariable(
        "rollback_to",
        ("rollback",),
        "the newest",
        "Number of the saved state. Numbers differ between hosts, so use it with `--limit` to one host.",
        literal=False,
    ),
    PlaybookVariable(
        "verify_services",
        ("report", "verify"),
        "[]",
        "The Services to probe, as `NAMESPACE/NAME`. Without any `default/kubernetes` and the cluster's DNS.",
    ),
    PlaybookVariable("verify_traffic", ("report", "verify"), "false", "Whether to also probe Services from each host."),
)
