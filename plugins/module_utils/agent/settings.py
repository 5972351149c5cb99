# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The configuration as the agent loads it, at the start and at a reload."""

from __future__ import annotations

import os
from typing import NamedTuple, Tuple

from ..cluster.api.resource_types import ResourceType
from ..configuration.load import load_given
from ..configuration.model import KubeProxyConfiguration
from ..configuration.sections.network_policy import policy_resources
from ..serviceports.node import node_name
from .options import AgentOptions
from .telemetry.log import Log


class Settings(NamedTuple):
    """A configuration before a mode is chosen, and the node's name according to it."""

    configuration: KubeProxyConfiguration
    node_name: str

    @property
    def followed_node(self) -> str:
        """The name of the Node object to follow, empty for a host outside the cluster."""
        return "" if self.configuration.node_proxy.outside_host.enabled else self.node_name

    @property
    def follows_every_node(self) -> bool:
        """Whether all Node objects are needed, not only the one of this node."""
        return self.configuration.node_proxy.service_policy.node_weights

    @property
    def policies(self) -> Tuple[ResourceType, ...]:
        """The types of objects that network policies need."""
        return policy_resources(self.configuration.node_proxy.network_policy)


def load_settings(options: AgentOptions) -> Tuple[Settings, Tuple[str, ...]]:
    """Load the configuration that the options name; return it with its warnings. Raises ProxyError."""
    configuration, warnings = load_given(options.configuration, options.mode)
    name = node_name(options.node_name or configuration.hostname_override, os.uname().nodename)
    return Settings(configuration, name), tuple(warnings)


def configure_log(log: Log, options: AgentOptions, configuration: KubeProxyConfiguration) -> None:
    """Apply the settings of ``logging``; command line options take precedence."""
    log.as_json = (options.log_format or configuration.logging.format) == "json"
    log.verbose = options.verbose or configuration.debug_logging
