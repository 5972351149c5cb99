# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work in steps with pauses, done at once, as nothing else waits."""

from __future__ import annotations

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.socket import finished
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.tcp_flows import (
    Ended,
    Targets,
    ending_connections,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.flows import Frontend


def end_connections(family: str, endpoint: tuple[str, int], frontend: tuple[str, int]) -> Ended:
    """End the connections to an address and port that lead to an endpoint."""
    targets = Targets()
    targets.add([Frontend("TCP", *frontend)], [endpoint])
    return finished(ending_connections(family, targets))
