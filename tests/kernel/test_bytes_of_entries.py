# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The bytes that the account assumes for each kind of entry of nftables mode, compared with those that they take."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from tests.benchmarks.hostile_services import SOURCES, several

# isort: split

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.account import RATES, Parts, Products
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.owned_slices import EndpointCounts
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.desired import DesiredTables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import RESOURCE
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, service_ports_of
from tests.lab.manifests import Object
from tests.lab.memory_group import MemoryGroup

#: Services whose entries are nearly all of one kind: their features; and their ports, addresses and endpoints.
KINDS: dict[str, dict[str, Any]] = {
    "sources": {"annotations": SOURCES},
    "listed": {"weights": (255, 1)},
    "frontends": {},
    "affinity": {"sessionAffinity": "ClientIP"},
}
NUMBERS = {"sources": (40, 1), "listed": (30, 14), "frontends": (200, 60), "affinity": (100, 0, 12)}
#: Memory is not measured to the byte: Python and the kernel take it in larger pieces, on a busy machine 1.17 times as
#: much as is assumed.
TOLERANCE = 1.3


def programmed(services: list[tuple[Object, ...]]) -> int:
    """Program Services and compare the tables with the kernel; return the bytes that the account assumes for them."""
    state = ClusterState.from_objects([item for objects in services for item in objects])
    desired = {family: DesiredTables(RENDERING, DataplaneSettings(family, "n1", "192.0.2.1")) for family in FAMILIES}
    for family, tables in desired.items():
        context = NodeContext(family, "n1")
        tables.apply({name: service_ports_of(state, name, context) for name in state.services}, lambda key: ())
        tables.pop_changes()
        with NftablesResource(family) as resource:
            resource.apply(difference(resource.observe(), tables.desired[RESOURCE]))
    for family, tables in desired.items():
        with NftablesResource(family) as resource:
            assert not difference(resource.observe(), tables.desired[RESOURCE])
    return sum(
        RATES["nftables"].bytes(
            Products(service, EndpointCounts(state.slices_of(name).values())).shapes(Parts.of(service))
        )
        for name, service in state.services.items()
    )


def measured(group: MemoryGroup, kind: str) -> tuple[int, int]:
    """Return the bytes that a Service takes beyond those of a small one, and those that the account assumes."""
    programmed(several(1, 1, 1, **KINDS[kind]))
    before = group.usage()
    group.reset_peak()
    accounted = programmed(several(1, *NUMBERS[kind], **KINDS[kind]))
    return group.peak() - before, accounted


@pytest.mark.parametrize("kind", KINDS)
def test_the_account_assumes_at_least_the_bytes_that_entries_of_a_kind_take(kind: str) -> None:
    with MemoryGroup.made() as group:
        if group is None:
            pytest.skip("this machine permits no control group with a memory limit")
        with ProcessPoolExecutor(1, get_context("spawn"), group.enter) as pool:
            taken, accounted = pool.submit(measured, group, kind).result()
    assert 0.5 * accounted < taken < TOLERANCE * accounted
