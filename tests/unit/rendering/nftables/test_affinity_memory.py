# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rules of session affinity share their expressions and names: there are three rules for each endpoint."""

from __future__ import annotations

import tracemalloc
from typing import Any

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING

from .samples import sample_route, sample_settings

SERVICES, ENDPOINTS = 100, 20


def table(first: int) -> dict[Any, Any]:
    """Return the table of a number of Services with session affinity."""
    routes = [sample_route("IPv4", first + number, ENDPOINTS, affinity_seconds=60) for number in range(SERVICES)]
    return RENDERING.desired_tables({route.key: route for route in routes}, sample_settings("IPv4"))["table objects"]


def test_an_endpoint_with_affinity_takes_little_memory() -> None:
    table(1)
    tracemalloc.start()
    try:
        made = table(101)
        kept, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(key.kind == "set" for key in made if "affinity" in key.name) == SERVICES * ENDPOINTS
    # 2,300 bytes; without sharing 4,900.
    assert kept < 3000 * SERVICES * ENDPOINTS
