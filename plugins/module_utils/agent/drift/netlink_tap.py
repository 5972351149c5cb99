# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detect that another program asks IPVS or ipset to change something: by a netlink monitoring device."""

from __future__ import annotations

import contextlib
from typing import Dict, Optional, Sequence

from ...convergence.handles import KernelHandles
from ...errors import KernelError
from ...kernel.links import MONITORING_DEVICE, MONITORING_KIND, MonitoringDeviceResource
from ...kernel.request_tap import RequestTap
from ...resources import Change, Stage, apply_plan, plan
from .notifications import Watch, suspect


class NetlinkTap(Watch):
    """ipvs mode: changes that other programs ask IPVS or ipset for.

    ``active``: whether it works here; while it does not, contents have to be read more often. Making one raises
    KernelError if this kernel has no such devices, or this process may not use packet sockets.
    """

    def __init__(self, families: Sequence[str], handles: KernelHandles) -> None:
        self._families = tuple(families)
        self._handles = handles
        self._tap: Optional[RequestTap] = None
        self._open()

    @property
    def active(self) -> bool:
        """Whether external changes are being detected."""
        return self._tap is not None

    def _open(self) -> None:
        handles = self._handles
        ports = (handles.ipvs.netlink.port, handles.ipset.netlink.port)
        # Added even if it exists: that brings it up, and names a device of another kind.
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

    def look(self, found: Dict[str, str]) -> None:
        """See the base class. Makes a device that another program has removed again; raises KernelError on failure."""
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
