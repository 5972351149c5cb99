# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Repairs of external changes: counted, logged and posted as Events, and repeated after a failure.

Services and network policies report them alike.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

from ...base.errors import KernelError, ProxyError
from ...convergence.modes.stages.sysctls import sysctl_stage
from ...event_reasons import Reason
from ...kernel.parameters.sysctls import SysctlsResource, Wanted
from ...resources import Change, PlannedChange, plan
from ..api.events import WARNING
from ..other_proxy import OtherProxy
from ..reports import Reports
from .attribution import attributed, written

#: Seconds between reads of kernel parameters, of whose changes the kernel sends no notifications: less than 1 ms each.
PARAMETERS_SECONDS = 10.0


class Repairs:
    """Reports the repairs of tables. A family is IPv4 or IPv6, or NetworkPolicy.

    ``count``: the entries that were repaired.
    """

    def __init__(self, reports: Reports) -> None:
        self.count = 0
        self._log, self._limited, self._post = reports.log, reports.limited, reports.post
        # Families whose repair failed because another program made changes at the same time, with the reason for the
        # repair.
        self._unrepaired: Dict[str, str] = {}

    def succeeded(self, family: str, suspicion: str, changes: Sequence[PlannedChange], seconds: float) -> int:
        """Count the entries that a repair changed and log them in one line; return their number."""
        count = sum(len(item.change) for item in changes)
        self.count += count
        if count:
            what = attributed(changes)
            logged = self._limited.warning(
                ("repair", family),
                "repaired external changes",
                family=family,
                noticed_by=suspicion,
                **what,
                entries=count,
                seconds=round(seconds, 4),
            )
            if logged:
                words = "; ".join(f"{word}: {text}" for word, text in what.items())
                self._post(None, WARNING, Reason.DRIFT_REPAIRED, "Repair", f"{family}: {words}")
        else:
            self._log.debug("nothing to repair", family=family, noticed_by=suspicion)
        return count

    def failed(self, family: str, suspicion: str, error: ProxyError) -> None:
        """Remember a repair that failed, for the next sync, and post an Event about the first failure."""
        if family not in self._unrepaired:
            note = f"{family}: external changes are not repaired yet ({suspicion}): {error}"
            self._post(None, WARNING, Reason.DRIFT_NOT_REPAIRED, "Repair", note)
        self._unrepaired[family] = suspicion

    def pop_unrepaired(self, family: str) -> str:
        """Return the reason for a repair of a family that failed, and forget it; empty if none did."""
        return self._unrepaired.pop(family, "")


class ServiceRepairs(Repairs):
    """Reports the repairs of Services, which another service proxy may revert, and repairs kernel parameters.

    ``count`` includes the parameters.
    """

    def __init__(self, reports: Reports, other_proxy: OtherProxy) -> None:
        super().__init__(reports)
        self._other_proxy = other_proxy
        self._metrics = reports.metrics
        self._refused_parameters: List[str] = []

    def succeeded(self, family: str, suspicion: str, changes: Sequence[PlannedChange], seconds: float) -> int:
        """See the base class. Also count the entries by resource, and those that another program has written."""
        by_others = written(changes)
        if by_others:
            self._other_proxy.repaired(family, by_others, suspicion)
        elif not changes:
            self._other_proxy.intact(family)
        for item in changes:
            self._metrics.drift_repaired.labels(item.resource.kind, item.resource.family).inc(len(item.change))
        return super().succeeded(family, suspicion, changes, seconds)

    def repair_parameters(self, wanted: Mapping[str, Wanted]) -> None:
        """Restore kernel parameters that another program has changed, and count them as drift.

        What the kernel refuses is logged once, until something else is refused.
        """
        try:
            repaired, refused = repair_parameters(wanted)
        except KernelError as error:
            repaired, refused = {}, [str(error)]
        if repaired:
            self.count += len(repaired)
            self._metrics.drift_repaired.labels(SysctlsResource.kind, SysctlsResource.family).inc(len(repaired))
            what = ", ".join(f"{key} from {old} to {new}" for key, (old, new) in repaired.items())
            text = "restored kernel parameters that another program had changed"
            if self._limited.warning("parameters", text, parameters=what):
                self._post(None, WARNING, Reason.DRIFT_REPAIRED, "Repair", f"kernel parameters: {what}")
        if refused and refused != self._refused_parameters:
            reason = "; ".join(refused)
            self._log.warning("kernel parameters cannot be restored", reason=reason)
            self._post(None, WARNING, Reason.DRIFT_NOT_REPAIRED, "Repair", f"kernel parameters: {reason}")
        self._refused_parameters = refused


class RepairedParameters(NamedTuple):
    """Parameters that were restored, each with the value found and the value wanted.

    ``refused``: one line for each parameter that the kernel refused to change.
    """

    repaired: Dict[str, Tuple[str, str]]
    refused: List[str]


def repair_parameters(wanted: Mapping[str, Wanted]) -> RepairedParameters:
    """Restore each kernel parameter that differs from its wanted value.

    Programs that change them are, for example, tuned, Docker, and ``sysctl --system`` after an update.

    Parameters that cannot be changed in this container or network namespace are skipped, as at the start. Raises
    KernelError if a parameter cannot be read.
    """
    stage, _unchangeable = sysctl_stage(wanted)
    found = RepairedParameters({}, [])
    for resource, change, *_observed in plan([stage]):
        parts = [(key, Change(replaced={key: values})) for key, values in change.replaced.items()]
        parts += [(key, Change(added={key: value})) for key, value in change.added.items()]
        for key, part in parts:
            try:
                resource.apply(part)
            except KernelError as error:
                found.refused.append(str(error))
            else:
                # A parameter that the kernel does not have is an addition, which apply() refuses.
                found.repaired[key] = change.replaced[key]
    return found
