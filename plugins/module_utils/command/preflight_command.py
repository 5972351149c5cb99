# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``preflight``: the check of the units before each start, as root, since the agent's user cannot see programs."""

from __future__ import annotations

import argparse

from ..configuration.load import load_given
from ..preflight.findings import judge
from ..preflight.processes import leaves_services, service_proxy_findings
from .result import OK, CommandResult


def check_node(arguments: argparse.Namespace) -> CommandResult:
    """Check that no other service proxy runs here, or that none is kept off if the configuration leaves Services to it.

    Raises PreflightError, ConfigurationError.
    """
    found = service_proxy_findings()
    # Loaded only then, because that takes longer than everything else, and the agent starts after it.
    asks = found or leaves_services(arguments.config)
    if asks and load_given(arguments.config).configuration.node_proxy.network_policy.standalone:
        found = service_proxy_findings(standalone=True)
    warnings = tuple(judge(found, arguments.ignore))
    lines = [] if found else ["no other service proxy runs on this node"]
    return CommandResult(OK, lines, {"findings": [finding.name for finding in found]}, warnings)
