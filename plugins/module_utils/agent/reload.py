# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Apply a changed configuration to the running components of the agent."""

from __future__ import annotations

from typing import Optional

from ..base.errors import ProxyError
from ..configuration.validate import in_mode
from ..convergence.runtime.agent_client import Answer
from .components import Components
from .ports.control import ControlRequest
from .settings import Settings, configure_log, load_settings
from .telemetry.systemd import Systemd
from .threads.failures import Fatal


class Reloads:
    """Requests to read the configuration again, by a signal or by the node command, which waits for the result."""

    def __init__(self, components: Components, systemd: Systemd) -> None:
        self._components = components
        self._systemd = systemd
        self._requested = False
        self._questions: list[ControlRequest] = []

    def request(self, question: Optional[ControlRequest] = None) -> None:
        """Reload at the next :meth:`run`, and answer ``question`` then. A signal handler may call this without one."""
        if question is not None:
            self._questions.append(question)
        self._requested = True

    def run(self) -> bool:
        """Reload if that was requested; return whether a changed configuration is in effect."""
        if not self._requested:
            return False
        self._requested = False
        # While the agent waits for the cluster, systemd still waits for its start.
        started = not self._systemd.in_transition
        if started:
            self._systemd.reloading()
        answer: Answer = {"error": "reloading has failed because of a defect: see the agent's log"}
        try:
            changed = reload(self._components)
            answer = self._answer()
            return changed
        except Fatal as error:
            answer = {"error": f"the agent must be restarted: {error}"}
            raise
        finally:
            if started:
                self._systemd.ready()
            self._reply(answer)

    def refuse(self, reason: str) -> None:
        """Answer the questions that wait."""
        self._reply({"error": reason})

    def _answer(self) -> Answer:
        components = self._components
        if components.reload_error:
            return {"error": f"the previous configuration is kept: {components.reload_error}"}
        return {
            "node": components.node_name,
            "mode": components.configuration.mode,
            "warnings": list(components.configuration_warnings),
        }

    def _reply(self, answer: Answer) -> None:
        questions, self._questions = self._questions, []
        for question in questions:
            question.reply(answer)


def reload(components: Components) -> bool:
    """Load the configuration and apply it if it has changed; return whether a changed one is in effect.

    If loading it or setting up its mode fails, the configuration in effect is kept, and the failure is logged and part
    of the status.
    """
    log, before = components.log, components.settings
    try:
        after, warnings = load_settings(components.options)
        components.configuration_warnings = warnings
        for warning in warnings:
            log.warning(warning)
        components.views.poll_static()
        if after.configuration == before.configuration:
            log.info("the configuration has not changed")
            components.reload_error = ""
            return False
        _apply(components, before, after)
    except ProxyError as error:
        log.error("reload failed; keeping the previous configuration", error=error)
        components.reload_error = str(error)
        return False
    components.reload_error = ""
    log.info("the configuration has changed and is in effect")
    return True


def _apply(components: Components, before: Settings, after: Settings) -> None:
    configuration, node_proxy = after.configuration, after.configuration.node_proxy
    node_changed = after.followed_node != before.followed_node
    if after.followed_node and node_changed:
        # Setting up needs the new Node object.
        components.source.read_node(after.followed_node)
    components.views.confine(node_proxy.service_policy.external_ranges)
    if components.sync.proxiers is not None:
        try:
            components.sync.rebuild(components.request(configuration))
        except ProxyError:
            components.views.confine(before.configuration.node_proxy.service_policy.external_ranges)
            raise
    else:
        components.sync.configuration = configuration
    components.forwarding.configure(configuration)
    components.follow_nodes(before.followed_node, after)
    if after.node_name != before.node_name:
        components.log.info("the name of this node has changed", node=after.node_name, before=before.node_name)
    components.policy.configure(configuration, after.node_name)
    components.traffic.configure(node_proxy.traffic)
    components.source.follow_others(components.policy.resources)
    components.settings = after
    components.tell_pods_apart()
    components.api.configure(node_proxy.api_servers)
    configure_log(components.log, components.options, configuration)
    components.checks.settings = node_proxy.health_checks
    components.check_follower.follow(everything=True)
    components.views.poll_static(node_proxy.static_services.directory)
    components.health.timeout = 2 * components.configuration.sync_period
    components.surface.configure(in_mode(configuration, components.configuration.mode))
    components.ports.open()
