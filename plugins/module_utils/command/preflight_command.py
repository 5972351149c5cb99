# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``preflight``: the check of the units before each start, as root, since the agent's user cannot see programs."""

from __future__ import annotations

import argparse

from ..configuration.load import load_given
from ..preflight.findings import judge
from ..preflight.processes import service_proxy_findings
from .result import OK, CommandResult


def check_node(arguments: argparse.Namespace) -> CommandResult:
    """Check that no other service proxy runs here, or that none is kept off if the configuration leaves Services to it.

    Raises PreflightError, ConfigurationError.
    """
    found, kept_off = service_proxy_findings(), service_proxy_findings(standalone=True)
    # Only then, because reading the configuration takes longer than everything else.
    if found or kept_off:
        standalone = load_given(arguments.config).configuration.node_proxy.network_policy.standalone
        found = kept_off if standalone else found
    warnings = tuple(judge(found, arguments.ignore))
    lines = [] if found else ["no other service proxy runs on this node"]
    return CommandResult(OK, lines, {"findings": [finding.name for finding in found]}, warnings)
