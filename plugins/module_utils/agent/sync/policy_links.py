# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The interfaces on which link-local traffic of pods is denied, as the agent follows them."""

from __future__ import annotations

from ...convergence.policy import find_links
from ...errors import KernelError
from ...kernel.pod_links import PodLinks
from ...networkpolicy.node_policy import NodePolicy
from ...networkpolicy.rows import ANY, POLICED
from ..surface.log import LimitedLog


class PolicyLinks:
    """Gives policies the interfaces of their pods. ``due``: interfaces of the node may have come or gone."""

    def __init__(self, limited: LimitedLog) -> None:
        self.due = True
        self._links = PodLinks()
        self._limited = limited

    def follow(self, policy: NodePolicy, everything: bool) -> None:
        """Look for interfaces if pods that policies limit, or addresses of the node, have changed.

        ``everything``: determine known ones again, too. Policies are in force without it, except for link-local
        addresses, so a failure only causes a warning.
        """
        if everything:
            self._links.forget()
        elif not self.due and not any(row[0] in (POLICED, ANY) for row in policy.table.journal):
            return
        self.due = True
        try:
            find_links(policy, self._links)
            self.due = False
        except KernelError as error:
            text = "the interfaces of pods are not known; their link-local traffic is not denied"
            self._limited.warning("links", text, error=error)
