# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The interfaces of the pods of the node, as the agent follows them."""

from __future__ import annotations

from ...base.errors import KernelError
from ...configuration.sections.network_policy import NetworkPolicySettings
from ...convergence.policy import find_links
from ...kernel.pod_links import PodLinks
from ...networkpolicy.node_policy import NodePolicy
from ...networkpolicy.rows import ANY, POLICED, SELF
from ..telemetry.log import LimitedLog


class PolicyLinks:
    """Gives policies the interfaces of their pods. ``due``: interfaces of the node may have come or gone."""

    def __init__(self, limited: LimitedLog) -> None:
        self.due = True
        self._links = PodLinks()
        self._limited = limited

    def follow(self, policy: NodePolicy, settings: NetworkPolicySettings, everything: bool) -> None:
        """Look for interfaces if pods of the node, what policies limit, or addresses of the node have changed.

        ``everything``: determine known ones again, too. Policies are in force without it, except for link-local and
        forged addresses, so a failure only causes a warning.
        """
        if everything:
            self._links.forget()
        elif not self.due and not any(row[0] in (SELF, POLICED, ANY) for row in policy.table.journal):
            return
        self.due = True
        try:
            find_links(policy, settings, self._links)
            self.due = False
        except KernelError as error:
            text = (
                "the interfaces of pods are not known; link-local traffic and forged sources are not denied on new ones"
            )
            self._limited.warning("links", text, error=error)
