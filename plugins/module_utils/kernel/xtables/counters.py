# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The connections that the endpoint chains of iptables mode have counted.

Only the first packet of a connection passes the table nat, so the packets of a DNAT rule are connections.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ...base.errors import KernelError
from ...base.progress import Progress, unheeded
from ...rendering.iptables.names import CLUSTER_PREFIX, ENDPOINT_PREFIX, LOCAL_PREFIX
from ...rendering.iptables.tables import NAT
from ..programs import run
from .variant import XtablesVariant

_DNAT = re.compile(rf"^\[(\d+):\d+\] -A ({ENDPOINT_PREFIX}\S+) .*-j DNAT --to-destination (\S+)", re.MULTILINE)
_JUMP = re.compile(
    rf"^\[\d+:\d+\] -A ((?:{CLUSTER_PREFIX}|{LOCAL_PREFIX})\S+) .*-j ({ENDPOINT_PREFIX}\S+)", re.MULTILINE
)


class EndpointChain(NamedTuple):
    """The endpoint of a chain, as ``ip:port``, and the connections that its DNAT rule has counted."""

    endpoint: str
    connections: int


class ChainCounters(NamedTuple):
    """The chains of endpoints by name, and the names of those that each chain of a ServicePort leads to."""

    endpoints: dict[str, EndpointChain]
    reached: dict[str, list[str]]


def parse_counters(text: str) -> ChainCounters:
    """Parse the output of iptables-save with counters."""
    endpoints = {chain: EndpointChain(endpoint, int(packets)) for packets, chain, endpoint in _DNAT.findall(text)}
    reached: dict[str, list[str]] = {}
    for chain, target in _JUMP.findall(text):
        reached.setdefault(chain, []).append(target)
    return ChainCounters(endpoints, reached)


def chain_counters(variant: XtablesVariant, progress: Progress = unheeded) -> ChainCounters:
    """Read the counters of the chains of endpoints. Raises KernelError."""
    done = run([variant.save, "-c", "-t", NAT], progress=progress)
    if done.status:
        reason = " ".join(done.errors.split()) or f"exit status {done.status}"
        raise KernelError(f"counters of table {NAT} cannot be read: {reason}")
    return parse_counters(done.output)
