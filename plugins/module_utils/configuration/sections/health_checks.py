# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``healthChecks``: the Services whose endpoints the agent may check, and when it ignores the results."""

from __future__ import annotations

from typing import NamedTuple, Tuple

from ..field import AGENT, Field
from ..reader import Section

MOST_CHECKS = 200


class HealthChecks(NamedTuple):
    """``namespaces``: those whose Services may request checks. ``most_endpoints``: how many endpoints are checked.

    ``panic_percent``: if at most this percentage of the ready endpoints of a port passes, all are served.
    """

    namespaces: Tuple[str, ...] = ()
    most_endpoints: int = MOST_CHECKS
    panic_percent: int = 0


FIELDS = (
    Field(
        "healthChecks.namespaces",
        "health_checks.namespaces",
        "none",
        "all",
        AGENT,
        "namespaces of the cluster whose Services may request [health checks](static-services.md#health-checks) by "
        "annotations; static Services always may",
    ),
    Field(
        "healthChecks.maximum",
        "health_checks.most_endpoints",
        str(MOST_CHECKS),
        "all",
        AGENT,
        f"number of endpoints that are checked, 0 to {MOST_CHECKS}; the others are served unchecked, with a warning",
    ),
    Field(
        "healthChecks.panicPercent",
        "health_checks.panic_percent",
        "0",
        "all",
        AGENT,
        "if at most this percentage of the ready endpoints of a port passes, all of them are served, 0 to 100",
    ),
)


def read(section: Section) -> HealthChecks:
    """Read and validate the section."""
    namespaces = section.namespaces("namespaces")
    found = HealthChecks(
        namespaces,
        section.integer("maximum", MOST_CHECKS, 0, MOST_CHECKS),
        section.integer("panicPercent", 0, 0, 100),
    )
    section.finish()
    return found
