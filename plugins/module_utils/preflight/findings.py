# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Findings of the checks, and their conversion to one error or to warnings."""

from __future__ import annotations

from typing import Iterable, NamedTuple, Sequence

from ..base.errors import ConfigurationError, PreflightError

ERROR = "error"
WARNING = "warning"
#: The names of findings about other programs on the node.
CONFLICTS = (
    KUBE_PROXY := "kube-proxy",
    KUBE_ROUTER := "kube-router",
    EMBEDDED_KUBE_PROXY := "embedded-kube-proxy",
    CILIUM := "cilium",
    FIREWALLD := "firewalld",
    UFW := "ufw",
    FORWARD_DROP := "forward-drop",
    OTHER_POLICIES := "other-network-policies",
    KEPT_OFF := "kept-off",
    LOCALHOST_NODE_PORT := "localhost-node-port",
)
#: All names, which ``ignore_findings`` accepts. The others are about the node itself or the cluster state.
NAMES = (
    RIGHTS := "rights",
    TOOLS := "tools",
    MODULES := "modules",
    KERNEL_VERSION := "kernel-version",
    FAMILIES := "families",
    EXTENSIONS := "extensions",
    IPVS := "ipvs",
    IPSET := "ipset",
    SET_LIMIT := "set-limit",
    *CONFLICTS,
    BRIDGE_NETFILTER := "bridge-netfilter",
    BRIDGE_PORTS := "bridge-ports",
    UNKNOWN_PODS := "unknown-pods",
    NODE := "node",
    INCOMPLETE_SNAPSHOT := "incomplete-snapshot",
    LOSS := "loss",
    OTHER_CLUSTER := "other-cluster",
    KUBELET := "kubelet",
)


class Finding(NamedTuple):
    """One missing feature or conflict.

    ``name``: one of NAMES, for ``ignore_findings``. ``severity``: ERROR (do not continue) or WARNING. ``what``: a
    clause that names the object and the problem. ``remedy``: a clause that says what to do.
    """

    name: str
    severity: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return " ".join(f"{self.what}: {self.remedy}".split())


def judge(findings: Iterable[Finding], ignore: Sequence[str] = ()) -> list[str]:
    """Return the warnings, one line each; raise PreflightError listing all errors.

    Errors named in ``ignore`` become warnings, and warnings named there are dropped. Raises ConfigurationError for an
    unknown name in ``ignore``.
    """
    unknown = sorted(set(ignore).difference(NAMES))
    if unknown:
        raise ConfigurationError(
            f"ignore_findings: {', '.join(unknown)}: not the name of a finding ({', '.join(NAMES)})"
        )
    errors: list[str] = []
    warnings: list[str] = []
    for finding in findings:
        if finding.severity == ERROR and finding.name not in ignore:
            errors.append(f"{finding} [{finding.name}]")
        elif finding.severity == ERROR:
            warnings.append(f"ignored: {finding} [{finding.name}]")
        elif finding.name not in ignore:
            warnings.append(f"{finding} [{finding.name}]")
    if errors:
        raise PreflightError("; ".join(errors))
    return warnings
