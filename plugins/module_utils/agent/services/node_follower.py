# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes of this node's Node object, and how they reach the proxiers."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

from ...base.errors import ProxyError
from ...cluster.model import Node
from ...configuration.model import NODE_CIDR
from ..reports import Reports
from ..threads.timers import RETRY_SECONDS, Pace, Timers
from .setup import Proxiers

#: A zone concerns every Service, and a controller may change the label again and again.
ZONE_PAUSE_SECONDS = 30.0


class NodeChange(NamedTuple):
    """What changed in the part of a Node on which the settings of its families depend, in words.

    ``lost``: what the Node had before and does not have any more.
    """

    found: tuple[str, ...]
    lost: tuple[str, ...]


def node_change(before: Node, now: Node, *, uses_pod_cidrs: bool) -> NodeChange:
    """Compare two versions of a Node. ``uses_pod_cidrs``: whether the settings depend on its podCIDRs."""
    parts = [("addresses", before.internal_ips + before.external_ips, now.internal_ips + now.external_ips)]
    if uses_pod_cidrs:
        parts.append(("podCIDRs", before.pod_cidrs, now.pod_cidrs))
    changed = [(name, values) for name, values_before, values in parts if values_before != values]
    return NodeChange(
        tuple(name for name, values in changed if values), tuple(name for name, values in changed if not values)
    )


class NodeFollower:
    """Follows the Node object of this node.

    The node is set up again when the Node becomes known, and when addresses or podCIDRs on which the settings depend
    have changed; kube-proxy must be restarted for that (its pkg/proxy/node.go). Values that the Node has lost remain in
    effect, since without them node ports would answer on more addresses than before, and no traffic of pods would be
    recognised. ``in_effect``: the version for which the node was set up, None without a Node. ``zone_changed`` is
    called with a new zone, at most every ZONE_PAUSE_SECONDS.
    """

    def __init__(self, timers: Timers, reports: Reports, *, zone_changed: Callable[[str], None]) -> None:
        self.in_effect: Optional[Node] = None
        # What the Node has lost, as reported.
        self._lost: tuple[str, ...] = ()
        self._rebuild: Callable[[], None] = lambda: None
        self._retry = timers.add("apply a change of the Node", self._set_up_again)
        # The zone in effect, and that of the Node.
        self._zone = self._latest_zone = ""
        self._zone_changed = zone_changed
        self._zone_pace = Pace(timers.clock, 0.0, ZONE_PAUSE_SECONDS)
        self._zone_timer = timers.add("apply the zone of the Node", self._apply_zone)
        self._log, self._limited = reports.log, reports.limited

    def set_up_for(self, node: Optional[Node]) -> None:
        """Record for which version of the Node the node was set up."""
        self.in_effect = node
        self._lost = ()

    def deleted(self, name: str) -> None:
        """Report that the Node object was deleted."""
        if self.in_effect is not None:
            self._log.warning("this node's Node object was deleted; its last version remains in effect", node=name)

    def follow(self, node: Node, proxiers: Proxiers, rebuild: Callable[[], None]) -> bool:
        """Apply changes of the Node object; return whether every Service must be rendered again.

        ``rebuild`` sets the node up again. Where it fails, the node is served as before and the call is repeated.
        """
        self._rebuild = rebuild
        if self.in_effect is None:
            self._log.info("the Node object of this node is available now", node=node.name)
            return self._set_up_again()
        if not proxiers.mode.serves:
            return False
        uses_pod_cidrs = proxiers.configuration.detect_local_mode == NODE_CIDR
        change = node_change(self.in_effect, node, uses_pod_cidrs=uses_pod_cidrs)
        for name in change.lost:
            if name not in self._lost:
                self._log.warning(f"the Node no longer has {name}; the last ones remain in effect", node=node.name)
        self._lost = change.lost
        if change.lost:
            self._retry.cancel()
        elif change.found:
            self._log.info("the Node changed", node=node.name, changed=", ".join(change.found))
            return self._set_up_again()
        self._zone, self._latest_zone = proxiers.families[0].context.node.zone, node.zone
        if self._zone_pace.rest():
            self._zone_timer.start(self._zone_pace.rest())
        else:
            self._apply_zone()
        return False

    def _apply_zone(self) -> None:
        if self._zone != self._latest_zone:
            self._zone = self._latest_zone
            self._zone_pace.worked(0)
            self._log.info("the zone of this node changed", zone=self._zone)
            self._zone_changed(self._zone)

    def _set_up_again(self) -> bool:
        """Set the node up again for its changed Node; return whether that succeeded."""
        try:
            self._rebuild()
        except ProxyError as error:
            self._limited.warning("node", "the change of the Node cannot be applied, retrying", error=error)
            self._retry.start(RETRY_SECONDS)
            return False
        self._retry.cancel()
        return True
