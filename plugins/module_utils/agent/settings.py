# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The configuration as the agent loads it, at the start and at a reload."""

from __future__ import annotations

import os
from typing import NamedTuple

from ..base.installed import STATE_DIRECTORY
from ..cluster.api.resource_types import ResourceType
from ..configuration.load import load_given
from ..configuration.model import KubeProxyConfiguration
from ..convergence.defaults import DEFAULT_UNSERVED_PERCENT
from ..convergence.drain.record import DEFAULT_FILE as DEFAULT_DRAIN
from ..convergence.runtime.state_directory import DEFAULT_CACHE, DEFAULT_CONTROL, DEFAULT_TOKEN
from ..serviceports.node import node_name
from .telemetry.log import Log

_NAMED_OTHERWISE = ("configuration", "ignore_findings")


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
    def policies(self) -> tuple[ResourceType, ...]:
        """The types of objects that network policies need."""
        return self.configuration.node_proxy.network_policy.resources


def load_settings(options: AgentOptions) -> tuple[Settings, tuple[str, ...]]:
    """Load the configuration that the options name; return it with its warnings. Raises ProxyError."""
    configuration, warnings = load_given(options.configuration, options.mode)
    name = node_name(options.node_name or configuration.hostname_override, os.uname().nodename)
    return Settings(configuration, name), tuple(warnings)


def configure_log(log: Log, options: AgentOptions, configuration: KubeProxyConfiguration) -> None:
    """Apply the settings of ``logging``; command line options take precedence."""
    log.as_json = (options.log_format or configuration.logging.format) == "json"
    log.verbose = options.verbose or configuration.debug_logging


class AgentOptions(NamedTuple):
    """The command line options of an agent. An empty string selects the value of the configuration."""

    configuration: str = ""
    kubeconfig: str = ""
    node_name: str = ""
    mode: str = ""
    fallback: str = ""
    state_directory: str = STATE_DIRECTORY
    #: The file for the cluster state, empty for none.
    cache: str = DEFAULT_CACHE
    #: Path of the unix socket for the node command, empty for none.
    control: str = DEFAULT_CONTROL
    #: A file with a token for the API server, which the agent renews if the file exists; empty for none.
    token: str = DEFAULT_TOKEN
    #: The file by which root keeps the node drained.
    drain_file: str = DEFAULT_DRAIN
    ignore_findings: tuple[str, ...] = ()
    #: A greater loss, in percent of the Services with endpoints, is reported.
    max_unserved_percent: float = DEFAULT_UNSERVED_PERCENT
    #: The maximum number of seconds for which such a loss is not applied, 0 to apply it immediately.
    hold_loss: float = 0.0
    #: Log debug messages regardless of the configuration.
    verbose: bool = False
    log_format: str = ""


def command_line_flags(options: AgentOptions) -> dict[str, str]:
    """Return the options of ``kubenode-proxy run`` by name, with the values in effect."""
    flags = {
        "config": options.configuration,
        "ignore": ",".join(options.ignore_findings),
        **{name: str(getattr(options, name)) for name in AgentOptions._fields if name not in _NAMED_OTHERWISE},
    }
    return {name.replace("_", "-"): value for name, value in flags.items()}
