# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The values of the metrics of network policies."""

from __future__ import annotations

import contextlib
from typing import Any, Mapping

from ...base.errors import KernelError
from ...cluster.model import NamespacedName
from ...kernel.nftables.traffic.element_counters import denied_packets, forged_packets
from ...networkpolicy.matching.owners import Address

#: A node has a few hundred pods. With more of them than this, packets are counted by direction only.
_MOST_PODS = 1_000
_DIRECTIONS = {"in": "ingress", "out": "egress"}


def policy_values(status: Mapping[str, Any], pods: Mapping[Address, NamespacedName]) -> Mapping[str, Any]:
    """Return the values by the keys of the table POLICIES; none while policies are not enforced.

    ``status``: see :meth:`.PolicySync.status`. ``pods``: of this node, by address.
    """
    return {**status, "denied": _denied(pods), "forged": _forged()} if status else {}


def _forged() -> Mapping[tuple[str], int]:
    # The table cannot be read. The code that writes it reports that; other metrics are served.
    with contextlib.suppress(KernelError):
        return {(interface,): packets for interface, packets in sorted(forged_packets().items())}
    return {}


def _denied(pods: Mapping[Address, NamespacedName]) -> Mapping[tuple[str, str, str], int]:
    nobody = NamespacedName("", "")
    every: dict[tuple[str, str, str], int] = {}
    # As with forged packets.
    with contextlib.suppress(KernelError):
        for (side, address), packets in denied_packets().items():
            owner = nobody if len(pods) > _MOST_PODS else pods.get(address)
            if owner is not None:
                labels = (_DIRECTIONS[side], owner.namespace, owner.name)
                every[labels] = every.get(labels, 0) + packets
    return dict(sorted(every.items()))
