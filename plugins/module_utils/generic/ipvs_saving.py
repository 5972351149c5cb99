# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file from which IPVS is restored at boot, written as the kernel's tables are after a change.

Tasks of several hosts may change the tables of one load balancer at the same time. Those that save them do so one after
the other, each with what the kernel has after its own change, so that no file lacks an entry of a task before it.
"""

from __future__ import annotations

from typing import Iterable, Mapping, Sequence

from ..base.addresses import FAMILIES
from ..convergence.runtime.lock import task_lock
from ..kernel.files import FilesResource
from ..kernel.ipvs.messages import TIMEOUTS
from ..kernel.ipvs.servers import IpvsSocket, RealServersResource, VirtualServersResource
from ..rendering.ipvs.model import RealServer, RealServerKey, VirtualServer, VirtualServerKey
from ..rendering.ipvs.text import ipvsadm_text
from ..resources import PlannedChange, Stage, apply_plan, plan
from .ipvs_services import ListedTables, stages

DIRECTORY = "/run/kubenode-ipvs-services"
_MODE = 0o600


def saved_text(planned: Iterable[PlannedChange], timeouts: Mapping[str, int]) -> str:
    """Return the tables after the planned changes, as input of ``ipvsadm -R``.

    ``planned`` covers both families. ``timeouts``: all three of the kernel, which the text sets first.
    """
    servers: dict[VirtualServerKey, VirtualServer] = {}
    real_servers: dict[RealServerKey, RealServer] = {}
    for item in planned:
        after = {**item.observed, **item.change.new_values()}
        for key in item.change.removed:
            del after[key]
        if isinstance(item.resource, VirtualServersResource):
            servers.update(after)
        elif isinstance(item.resource, RealServersResource):
            real_servers.update(after)
    # In the order in which ipvsadm's option --set takes them.
    first = f"--set {' '.join(str(timeouts[name]) for name in TIMEOUTS)}\n" if timeouts else ""
    return first + ipvsadm_text(servers, real_servers)


def _save_stage(path: str, text: str) -> Stage:
    return Stage(FilesResource([path], _MODE), {path: text})


def predict(
    connection: IpvsSocket, declared: Sequence[Stage], path: str, timeouts: Mapping[str, int]
) -> list[PlannedChange]:
    """Return the changes of :func:`change`, without making them. Raises KernelError."""
    planned = plan(declared)
    if path:
        planned += plan([_save_stage(path, saved_text(planned, {**connection.timeouts(), **timeouts}))])
    return planned


def change(connection: IpvsSocket, declared: Sequence[Stage], path: str) -> list[PlannedChange]:
    """Make the tables as declared, write what the kernel has then to ``path``, and return both changes.

    ``path``: empty not to save. ``declared`` covers both families if it is given. Raises KernelError, also if another
    task that saves does not end in time.
    """
    with task_lock(DIRECTORY if path else ""):
        planned = plan(declared)
        apply_plan(planned)
        if path:
            nothing = ListedTables()
            kernel = plan(stages(connection, nothing, purge=(), present=True, timeouts={}, families=FAMILIES))
            saved = plan([_save_stage(path, saved_text(kernel, connection.timeouts()))])
            apply_plan(saved)
            planned += saved
    return planned
