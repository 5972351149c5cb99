# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fields ``behaviour``, ``nodePortRange`` and ``endConnectionsOfDeletedServices``, which correct defects."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional, Tuple

from ...cluster.fields import shown
from ..behaviour import BEHAVIOURS, KUBE_PROXY, Behaviour
from ..field import HONOURED, Field
from ..reader import Section

_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
#: The default of the API server's option --service-node-port-range.
NODE_PORTS = (30000, 32767)


class BehaviourSettings(NamedTuple):
    """The corrections. ``name``: of a Behaviour. ``node_ports``: first and last of the range of node ports."""

    name: str = KUBE_PROXY.name
    node_ports: Tuple[int, int] = NODE_PORTS
    end_deleted: bool = False

    @property
    def behaviour(self) -> Behaviour:
        """Which of kube-proxy's defects are corrected."""
        return BEHAVIOURS[self.name]


FIELDS: Tuple[Field, ...] = (
    Field(
        "behaviour",
        "behaviour.name",
        "`kube-proxy`",
        "all",
        HONOURED,
        "`kube-proxy`, or `corrected` to correct its known defects: see [conformance.md](conformance.md)",
    ),
    Field(
        "nodePortRange",
        "behaviour.node_ports",
        "`30000-32767`",
        "all",
        HONOURED,
        "the cluster's range of node ports, from which corrected behaviour takes no source port for masquerading",
    ),
    Field(
        "endConnectionsOfDeletedServices",
        "behaviour.end_deleted",
        "`false`",
        "all",
        HONOURED,
        "with corrected behaviour, connection tracking entries of TCP connections through deleted Services are deleted"
        " as well, not only those of UDP and SCTP",
    ),
)


def read(root: Section) -> BehaviourSettings:
    """Read the fields from the document itself; record invalid values."""
    name = root.text("behaviour", KUBE_PROXY.name)
    if name not in BEHAVIOURS:
        root.findings.problem("behaviour", f"{shown(name)} is not {' or '.join(BEHAVIOURS)}")
    text = root.text("nodePortRange")
    node_ports = _node_ports(text)
    if node_ports is None:
        reason = f"{shown(text)} is not a range of ports from 1 to 65535, such as 30000-32767"
        root.findings.problem("nodePortRange", reason)
    return BehaviourSettings(name, node_ports or NODE_PORTS, root.flag("endConnectionsOfDeletedServices", False))


def _node_ports(text: str) -> Optional[Tuple[int, int]]:
    """Return the first and last port of a range, the default for an empty text, None if it is invalid."""
    if not text:
        return NODE_PORTS
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    first, last = int(match.group(1)), int(match.group(2))
    return (first, last) if 1 <= first <= last <= 65535 else None
