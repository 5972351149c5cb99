# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Connections to removed endpoints in a convergence, which is not there later: they are reset at once, or kept.

It does not know what was removed. So connections are ended that lead from a Service to anything but its endpoints.

It is imported only where this is requested: Ansible ships modules as source, which each run compiles.
"""

from __future__ import annotations

from typing import Iterable

from ..base.progress import Progress
from ..kernel.conntrack.socket import finished
from ..kernel.conntrack.tcp_flows import Targets, ending_connections
from ..serviceports.flows import frontends_of
from ..serviceports.info import ServicePortInfo


def end_removed(family: str, service_ports: Iterable[ServicePortInfo], progress: Progress) -> int:
    """Reset the connections of ServicePorts to removed endpoints; return their number. Raises KernelError."""
    targets = Targets()
    for info in service_ports:
        serving = [(item.ip, item.port) for item in info.endpoints if item.serving]
        if serving:
            targets.add(frontends_of(info), serving, others=True)
    return finished(ending_connections(family, targets, progress)).connections
