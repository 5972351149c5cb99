# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When the agent is ready. At boot kubelet waits for that before it starts pods, which need Services and policies."""

from __future__ import annotations

from ..base.errors import KernelError
from ..kernel.presence import holds_policies
from .components import Components
from .telemetry.systemd import Systemd

#: When to report to the service manager that the agent is ready although the API server has not answered.
PATIENCE_SECONDS = 10.0


class Readiness:
    """Reports to the service manager that the agent is ready: Services are served and network policies in force.

    A table of policies from an earlier run is in force until it is replaced. Without one, what the API server does not
    list in time is read from the copy on disk. After ``PATIENCE_SECONDS`` the agent is ready in any case, since a node
    whose Pods cannot be listed must start nevertheless.

    ``sent``: whether it has been reported. ``waits_for_lists``: whether to call :meth:`fill` again soon, since a
    request that fails wakes nothing.
    """

    def __init__(self, components: Components, systemd: Systemd) -> None:
        self.sent = False
        self._components = components
        self._systemd = systemd
        self._served = False
        self._serves_all = False
        self._protected = True
        self.waits_for_lists = False
        self._timer = components.timers.add("report that the agent is ready", self._patience_ended)

    def start(self) -> None:
        """Start the timeout after which the agent reports that it is ready."""
        self._timer.start(PATIENCE_SECONDS)
        if self._components.settings.policies:
            self._protected = self._holds_policies()
            self.waits_for_lists = not self._protected

    def _holds_policies(self) -> bool:
        """Return whether an earlier process left policies in force."""
        try:
            return holds_policies()
        except KernelError as error:
            self._components.log.debug("cannot determine whether the kernel enforces network policies", error=error)
            return False

    def served(self) -> None:
        """Record that static Services are served, or all."""
        self._served = True
        self.poll()

    def stages(self) -> dict[str, bool]:
        """Return whether all Services and, if they are enabled, network policies are in force, by name for /readyz.

        A table of policies from an earlier run does not count, since it does not have the pods that start now. Unlike
        the report to the service manager, this never ends by a timeout. May be called from any thread.
        """
        settings = self._components.settings
        stages = {}
        if not settings.configuration.node_proxy.network_policy.standalone:
            stages["services"] = self._serves_all
        if settings.policies:
            stages["policies"] = self._components.policy.in_force
        return stages

    def fill(self) -> None:
        """Fill in from the copy on disk what policies need and the API server does not list in time."""
        if self.waits_for_lists or self._components.source.unserved:
            settings = self._components.settings.configuration.node_proxy.network_policy
            self.waits_for_lists = not self._components.source.use_policies_if_late(settings.kinds)

    def poll(self) -> None:
        """Report that the agent is ready if it now is; to be called after each sync of policies."""
        self._serves_all |= not self._components.views.preliminary and self._components.sync.is_complete
        if self._served and not self.sent and self._enforces():
            self._send()

    def _enforces(self) -> bool:
        """Return whether policies are in force, or none are wanted."""
        return self._protected or not self._components.settings.policies or self._components.policy.in_force

    def _patience_ended(self) -> None:
        if not self._enforces():
            self._components.log.warning(
                "network policies are not in force yet: pods that start now are open until the objects are known",
                reason=self._components.policy.error or "waiting for the API server",
            )
        self._send()

    def _send(self) -> None:
        if not self.sent:
            self.sent = True
            self._timer.cancel()
            self._systemd.ready()
