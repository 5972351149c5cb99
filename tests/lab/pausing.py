# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work in steps with pauses, done at once, as nothing else waits."""

from __future__ import annotations

import time
from typing import Generator, Optional, Tuple, TypeVar

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.tcp_flows import (
    Ended,
    Targets,
    ending_connections,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.flows import Frontend

Found = TypeVar("Found")


def finish(steps: Generator[Optional[float], None, Found]) -> Found:
    """Take all steps, and return the result."""
    while True:
        try:
            time.sleep(next(steps) or 0.0)
        except StopIteration as end:
            result: Found = end.value
            return result


def end_connections(family: str, endpoint: Tuple[str, int], frontend: Tuple[str, int]) -> Ended:
    """End the connections to an address and port that lead to an endpoint."""
    targets = Targets()
    targets.add([Frontend("TCP", *frontend)], [endpoint])
    return finish(ending_connections(family, targets))
