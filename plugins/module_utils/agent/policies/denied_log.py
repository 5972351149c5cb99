# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One line in the log for each denied packet that the kernel logs: its ends, and the policies that isolate the pod.

No single policy denies a packet: it is denied because no rule of any policy that isolates the pod allows it.
"""

from __future__ import annotations

from typing import Optional

from ...base.addresses import is_link_local, unpacked
from ...base.errors import KernelError
from ...cluster.parsing.policy_objects import PolicyObjects
from ...cluster.policies.policy_model import EGRESS, INGRESS
from ...kernel.nflog import LoggedPacket, PacketLog
from ...networkpolicy.matching.owners import Address
from ...networkpolicy.node_policy import NodePolicy
from ...networkpolicy.verdicts import Flow, Verdicts
from ...rendering.networkpolicy.layout import log_prefix
from ...rendering.networkpolicy.sets import FORGED, NO_LOG
from ..reports import Reports

_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp", 132: "sctp"}
_DIRECTIONS = {log_prefix("in"): INGRESS, log_prefix("out"): EGRESS}


class DeniedLog:
    """Reads the NFLOG group while packets are logged."""

    def __init__(self, reports: Reports) -> None:
        self._log, self._limited = reports.log, reports.limited
        self._group = NO_LOG
        self._packets: Optional[PacketLog] = None

    def follow(self, group: int) -> None:
        """Read this NFLOG group from now on, or none."""
        if group == self._group and (self._packets is not None or group == NO_LOG):
            return
        self.close()
        self._group = group
        if group == NO_LOG:
            return
        try:
            self._packets = PacketLog(group)
        except KernelError as error:
            self._limited.warning("denied", "denied packets are not logged here", error=error)

    def filenos(self) -> list[int]:
        """Return the descriptors to wait for."""
        return [self._packets.fileno()] if self._packets is not None else []

    def report(self, objects: PolicyObjects, policy: NodePolicy, tiers: bool) -> None:
        """Log a line for each packet that has arrived. ``tiers``: ClusterNetworkPolicies are enforced, too."""
        if self._packets is None:
            return
        verdicts: Optional[Verdicts] = None
        try:
            for packet in self._packets.packets():
                if verdicts is None:
                    verdicts = Verdicts(objects, policy.owners, tiers, policy.too_large)
                self._write(packet, policy, verdicts)
        except KernelError as error:
            self._limited.warning("denied", "denied packets cannot be read", error=error)
            self.close()

    def _write(self, packet: LoggedPacket, policy: NodePolicy, verdicts: Verdicts) -> None:
        direction = _DIRECTIONS.get(packet.prefix)
        protocol = _PROTOCOLS.get(packet.protocol, str(packet.protocol))
        source, destination = (_shown(address, policy) for address in (packet.source, packet.destination))
        ends = {"source": source, "destination": destination, "protocol": protocol, "port": packet.port}
        if packet.prefix == log_prefix(FORGED):
            self._log.info("dropped a packet whose source is not its sender's", **ends)
        if direction is None:
            return
        own, peer = packet.source, packet.destination
        if direction == INGRESS:
            own, peer = peer, own
        link_local = is_link_local(unpacked(own))
        about = {"reason": "a link-local address" if link_local else "an address of no known pod"}
        if own in policy.owners.owners:
            verdict = verdicts.side(direction, own, Flow(peer, protocol, packet.port))
            about = {"reason": verdict.reason, "isolated_by": ",".join(verdict.isolated_by), "rule": verdict.by}
        reasons = {name: text for name, text in about.items() if text}
        self._log.info("denied by network policies", direction=direction.lower(), **ends, **reasons)

    def close(self) -> None:
        """Stop reading."""
        if self._packets is not None:
            self._packets.close()
            self._packets = None


def _shown(address: Address, policy: NodePolicy) -> str:
    owner = policy.owners.owners.get(address)
    return f"{owner.key} ({unpacked(address)})" if owner is not None else unpacked(address)
