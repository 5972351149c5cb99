# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detection of other programs' requests to change IPVS or ipsets, with a netlink monitoring device.

Any user of the node may send requests, and the device shows them before the kernel refuses them. So comparisons for
which they are the reason take a tenth of the time at most.
"""

from __future__ import annotations

import contextlib
import time
from typing import Optional, Sequence

from ...base.errors import KernelError
from ...convergence.handles import KernelHandles
from ...kernel.netlink.request_tap import RequestTap
from ...kernel.rtnetlink.links import MONITORING_DEVICE, MONITORING_KIND, MonitoringDeviceResource
from ...resources import Change, Stage, apply_plan, plan
from ..threads.timers import Pace, monotonic
from .notifications import Watch, suspect

_PAUSE_FACTOR = 9.0


class NetlinkTap(Watch):
    """Detects other programs' requests to IPVS and ipset, for ipvs mode.

    ``ipsets``: whether there are ipsets of ours; if not, ipset need not be loaded. ``active``: whether it works; while
    it does not, contents must be read more often. The constructor raises KernelError if the kernel has no such devices,
    or if this process may not use packet sockets.
    """

    def __init__(self, families: Sequence[str], handles: KernelHandles, ipsets: bool = True) -> None:
        self._families = tuple(families)
        self._ipsets = ipsets
        self._handles = handles
        self._tap: Optional[RequestTap] = None
        self._pace = Pace(monotonic, _PAUSE_FACTOR)
        # The processor time when a request was seen, until everything has been compared.
        self._seen_at: Optional[float] = None
        self._open()

    @property
    def active(self) -> bool:
        """Whether external changes are being detected."""
        return self._tap is not None

    def _open(self) -> None:
        handles = self._handles
        ports = [handles.ipvs.netlink.port, *([handles.ipset.netlink.port] if self._ipsets else [])]
        # Add the device even if it exists: that brings it up, and fails for a device of another kind.
        MonitoringDeviceResource(handles.route).apply(Change(added={MONITORING_DEVICE: MONITORING_KIND}))
        try:
            self._tap = RequestTap(MONITORING_DEVICE, handles.ipvs.family_id, ports)
        except KernelError:
            self._remove_device()
            raise

    def _remove_device(self) -> None:
        with contextlib.suppress(KernelError):
            apply_plan(plan([Stage(MonitoringDeviceResource(self._handles.route), {})]))

    def rest(self) -> float:
        """See the base class."""
        return self._pace.rest()

    @property
    def _is_quiet(self) -> bool:
        return self._tap is None or self._seen_at is not None or self.rest() > 0.0

    def fileno(self) -> int:
        """See the base class."""
        return -1 if self._tap is None or self._is_quiet else self._tap.fileno()

    def synced(self, changed: bool, observed: bool) -> None:
        """See the base class."""
        if observed and self._seen_at is not None:
            self._pace.worked(time.process_time() - self._seen_at)
            self._seen_at = None

    def poll(self, found: dict[str, str]) -> None:
        """See the base class. Recreate a device that another program has removed. Raises KernelError."""
        if self._tap is None or self._is_quiet:
            return
        try:
            if self._tap.pop_seen():
                self._seen_at = time.process_time()
                suspect(found, self._families, "request of another program to IPVS or ipset")
        except OSError as error:
            suspect(found, self._families, f"loss of the device {MONITORING_DEVICE} ({error.strerror})")
            self._tap.close()
            self._tap = None
            self._open()

    def close(self) -> None:
        """See the base class."""
        if self._tap is not None:
            self._tap.close()
            self._tap = None
        self._remove_device()
