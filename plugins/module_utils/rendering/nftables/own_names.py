# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sets and chains of the table that only this project creates, by name; kube-proxy creates all others as well.

kube-proxy's names of objects that belong to a Service contain a slash, and so do this project's for the same objects
(with session affinity). The other names are fixed in both.
"""

from __future__ import annotations

import re

from . import layout, traffic

OWN_SETS = frozenset(
    (
        layout.FRONTENDS,
        layout.NODE_PORT_FRONTENDS,
        layout.ENDPOINTS,
        layout.LOCAL_ENDPOINTS,
        layout.NODE_PORT_ENDPOINTS,
        layout.NODE_PORT_LOCAL_ENDPOINTS,
        layout.FIREWALLED,
        layout.LOCALHOST_COUNTS,
        # kube-proxy creates it as well from 1.38 on, and then refers to it, so that it is kept.
        layout.LOCALHOST_REJECTED,
        layout.NODE_PORT_FIREWALLED,
        traffic.SERVICE_TRAFFIC,
        traffic.NODE_PORT_TRAFFIC,
    )
)
_SET = re.compile(r"(?:nodeport-)?source-ranges-\d+|(?:service|nodeport)-(?:local-)?slots-[0-9a-f]{2}")
_CHOICE = r"(?:\d+|hash-(?:port-)?[0-9a-f]{2})"
_CHAIN = re.compile(
    rf"(?:nodeport-)?(?:(?:cluster|local|masquerade)-{_CHOICE}|external-{_CHOICE}-{_CHOICE}|firewall-\d+(?:-\d+)*)"
    rf"|nodeport-firewall-check|{layout.LOCALHOST_REJECT}|filter-(?:prerouting|output)-nodeports|{traffic.TRAFFIC}(?:-input|-postrouting)?"
)


def is_own(kind: str, name: str) -> bool:
    """Return whether only this project creates a set or chain (``kind``) of that name; False for other kinds."""
    if kind == "set":
        return name in OWN_SETS or _SET.fullmatch(name) is not None
    return kind == "chain" and _CHAIN.fullmatch(name) is not None
