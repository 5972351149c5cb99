# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detection of other programs' requests to change IPVS or ipsets, with a netlink monitoring device."""

from __future__ import annotations

import contextlib
from typing import Dict, Optional, Sequence

from ...base.errors import KernelError
from ...convergence.handles import KernelHandles
from ...kernel.netlink.request_tap import RequestTap
from ...kernel.rtnetlink.links import MONITORING_DEVICE, MONITORING_KIND, MonitoringDeviceResource
from ...resources import Change, Stage, apply_plan, plan
from .notifications import Watch, suspect


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

    def fileno(self) -> int:
        """See the base class."""
        return -1 if self._tap is None else self._tap.fileno()

    def poll(self, found: Dict[str, str]) -> None:
        """See the base class. Recreate a device that another program has removed. Raises KernelError."""
        if self._tap is None:
            return
        try:
            if self._tap.pop_seen():
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
