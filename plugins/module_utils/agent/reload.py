# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Apply a changed configuration to the running parts of the agent."""

from __future__ import annotations

from typing import List, Optional

from ..base.errors import ProxyError
from ..configuration.validate import in_mode
from ..convergence.runtime.agent_client import Answer
from .parts import Parts
from .ports.control import ControlRequest
from .settings import Settings, configure_log, load_settings
from .telemetry.systemd import Systemd
from .threads.failures import Fatal


class Reloads:
    """Requests to read the configuration again, by a signal or by the node command, which waits for the result."""

    def __init__(self, parts: Parts, systemd: Systemd) -> None:
        self._parts = parts
        self._systemd = systemd
        self._requested = False
        self._questions: List[ControlRequest] = []

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
            changed = reload(self._parts)
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
        parts = self._parts
        if parts.reload_error:
            return {"error": f"the previous configuration is kept: {parts.reload_error}"}
        return {
            "node": parts.node_name,
            "mode": parts.configuration.mode,
            "warnings": list(parts.configuration_warnings),
        }

    def _reply(self, answer: Answer) -> None:
        questions, self._questions = self._questions, []
        for question in questions:
            question.reply(answer)


def reload(parts: Parts) -> bool:
    """Load the configuration and apply it if it has changed; return whether a changed one is in effect.

    If loading it or setting up its mode fails, the configuration in effect is kept, and the failure is logged and part
    of the status.
    """
    log, before = parts.log, parts.settings
    try:
        after, warnings = load_settings(parts.options)
        parts.configuration_warnings = warnings
        for warning in warnings:
            log.warning(warning)
        parts.views.poll_static()
        if after.configuration == before.configuration:
            log.info("the configuration has not changed")
            parts.reload_error = ""
            return False
        _apply(parts, before, after)
    except ProxyError as error:
        log.error("reload failed; keeping the previous configuration", error=error)
        parts.reload_error = str(error)
        return False
    parts.reload_error = ""
    log.info("the configuration has changed and is in effect")
    return True


def _apply(parts: Parts, before: Settings, after: Settings) -> None:
    configuration, node_proxy = after.configuration, after.configuration.node_proxy
    node_changed = after.followed_node != before.followed_node
    if after.followed_node and node_changed:
        # Setting up needs the new Node object.
        parts.source.read_node(after.followed_node)
    parts.views.confine(node_proxy.service_policy.external_ranges)
    if parts.sync.proxiers is not None:
        try:
            parts.sync.rebuild(parts.request(configuration))
        except ProxyError:
            parts.views.confine(before.configuration.node_proxy.service_policy.external_ranges)
            raise
    else:
        parts.sync.configuration = configuration
    parts.forwarding.configure(configuration)
    parts.follow_nodes(before.followed_node, after)
    if after.node_name != before.node_name:
        parts.log.info("the name of this node has changed", node=after.node_name, before=before.node_name)
    parts.policy.configure(configuration, after.node_name)
    parts.traffic.configure(node_proxy.traffic)
    parts.source.follow_others(parts.policy.resources)
    parts.settings = after
    parts.tell_pods_apart()
    parts.api.configure(node_proxy.api_servers)
    configure_log(parts.log, parts.options, configuration)
    parts.checks.settings = node_proxy.health_checks
    parts.check_follower.follow(everything=True)
    parts.views.poll_static(node_proxy.static_services.directory)
    parts.health.timeout = 2 * parts.configuration.sync_period
    parts.surface.configure(in_mode(configuration, parts.configuration.mode))
    parts.ports.open()
