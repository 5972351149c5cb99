# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``check-configuration``: load a file as the agent does, so that a wrong one is refused before it is in place."""

from __future__ import annotations

import argparse

from ..agent.settings import AgentOptions, load_settings
from .result import OK, CommandResult


def check_configuration(arguments: argparse.Namespace) -> CommandResult:
    """Load the file; return its mode and the name of the node. Raises ProxyError, which names every invalid field."""
    settings, warnings = load_settings(AgentOptions(configuration=arguments.file))
    document = {"file": arguments.file, "mode": settings.configuration.mode, "node": settings.node_name}
    line = f"{arguments.file}: valid, mode {settings.configuration.mode}, node {settings.node_name}"
    return CommandResult(OK, [line], document, warnings)
