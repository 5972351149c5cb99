# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Apply a changed configuration to the running parts of the agent."""

from __future__ import annotations

from ..configuration.validate import in_mode
from ..errors import ProxyError
from .parts import Parts
from .settings import Settings, configure_log, load_settings


def reload(parts: Parts) -> bool:
    """Load the configuration and apply it if it has changed; return whether a changed one is in effect.

    If loading it or setting up its mode fails, the configuration in effect is kept, and the failure is logged and part
    of the status.
    """
    log, before = parts.log, parts.settings
    try:
        after, warnings = load_settings(parts.options)
        for warning in warnings:
            log.warning(warning)
        parts.views.look_for_static()
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
    if parts.sync.proxiers is not None:
        parts.sync.rebuild(parts.request(configuration))
    else:
        parts.sync.configuration = configuration
    parts.forwarding.configure(configuration)
    if node_changed or after.follows_every_node != before.follows_every_node:
        parts.source.follow_node(after.followed_node, before.followed_node, after.follows_every_node)
    if after.node_name != before.node_name:
        parts.log.info("the name of this node has changed", node=after.node_name, before=before.node_name)
    parts.policy.configure(node_proxy.network_policy, after.node_name)
    parts.traffic.configure(node_proxy.traffic)
    parts.source.follow_others(parts.policy.resources)
    parts.settings = after
    parts.api.configure(node_proxy.api_servers)
    configure_log(parts.log, parts.options, configuration)
    parts.checks.settings = node_proxy.health_checks
    parts.check_follower.follow(everything=True)
    parts.views.look_for_static(node_proxy.static_services.directory)
    parts.health.timeout = 2 * parts.configuration.sync_period
    parts.surface.configure(in_mode(configuration, parts.configuration.mode))
    parts.ports.open()
