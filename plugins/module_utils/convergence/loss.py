# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Refusal of changes after which most Services of the node would no longer be served, before anything is applied.

The Services served now are read from the kernel, no matter which program configured them (an earlier convergence, the
agent or kube-proxy) and in which mode.
"""

from __future__ import annotations

from typing import Mapping, Sequence

from ..base.addresses import family_of
from ..base.errors import KernelError, PreflightError
from ..cluster.state import ClusterState
from ..preflight.cluster_state import LOSS_MINIMUM, loss_findings
from ..preflight.findings import LOSS, Finding, judge
from ..rendering.served import routed_cluster_ips, served_cluster_ips
from ..resources import PlannedChange, Stage, plan
from .family import FamilyServices
from .request import Request
from .runtime.ledger import loss_was_refused, record_loss


class EndpointLossGuard:
    """Compares the Services served before and after the planned changes; ``warnings`` holds ignored findings."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.warnings: list[str] = []

    def judge(
        self, planned: Sequence[PlannedChange], others: Sequence[Stage], families: Sequence[FamilyServices]
    ) -> None:
        """Raise PreflightError if the planned changes would lose too many of the Services that are served now.

        ``planned``: the changes of the mode in effect. ``others``: stages that remove what other modes left. These are
        observed if the mode in effect serves almost nothing now, because then the node may be changing its mode. Raises
        KernelError if they cannot be observed.
        """
        if self._request.max_unserved_percent >= 100:
            return
        now = served_cluster_ips(item.observed for item in planned)
        if len(now) < LOSS_MINIMUM:
            now |= served_cluster_ips(item.observed for item in plan(others))
        findings = self._findings(now, families)
        if not findings:
            self._forget()
            return
        if self._request.unattended and LOSS not in self._request.ignore_findings:
            self._refuse_once(findings)
            return
        self.warnings += judge(findings, self._request.ignore_findings)

    def _findings(self, now: set[str], families: Sequence[FamilyServices]) -> list[Finding]:
        """Return the loss of the first family that loses too much; a Service has one cluster IP in each."""
        names = _service_names(self._request.cluster)
        for context, service_ports in families:
            before = {address for address in now if family_of(address) == context.family}
            after = routed_cluster_ips(service_ports.values())
            findings = loss_findings(before, after, names, self._request.max_unserved_percent)
            if findings:
                return findings
        return []

    def _refuse_once(self, findings: Sequence[Finding]) -> None:
        directory, hint = self._request.state_directory, "the next run applies the change if it finds the same"
        if loss_was_refused(directory):
            self.warnings += [f"applied because two consecutive runs found it: {finding.what}" for finding in findings]
            self._forget()
            return
        if not self._request.check:
            try:
                record_loss(directory, True)
            except KernelError as error:
                hint = str(error)
        try:
            judge(findings)
        except PreflightError as error:
            raise PreflightError(f"{error}; {hint}") from None

    def _forget(self) -> None:
        if not self._request.check:
            try:
                record_loss(self._request.state_directory, False)
            except KernelError as error:
                self.warnings.append(str(error))


def _service_names(cluster: ClusterState) -> Mapping[str, str]:
    names: dict[str, str] = {}
    for key, service in cluster.services.items():
        names[service.cluster_ip_v4] = names[service.cluster_ip_v6] = str(key)
    return names
