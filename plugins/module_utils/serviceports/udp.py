# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The condition for deleting stale conntrack entries of UDP Services.

kube-proxy 1.36 looks for stale entries only after a sync in which the endpoints of a Service with UDP ports changed,
and then for those of all Services. It keeps the entries of a Service without serving endpoints (pkg/proxy/conntrack).
"""

from __future__ import annotations

import hashlib
from typing import Iterable

from .info import ServicePortInfo


def udp_digest(service_ports: Iterable[ServicePortInfo]) -> str:
    """Return a digest of the serving endpoints of the UDP ports of a Service in one family; empty if there are none."""
    serving = sorted(
        {
            (info.key.port_name, endpoint.ip, endpoint.port)
            for info in service_ports
            if info.key.protocol == "UDP"
            for endpoint in info.endpoints
            if endpoint.serving
        }
    )
    return hashlib.sha256(repr(serving).encode()).hexdigest() if serving else ""
