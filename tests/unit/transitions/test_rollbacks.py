# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rollback to a saved state of each mode, on a node that is in any mode by then.

Between nftables and iptables mode every packet fares as before or as after; from and to ipvs mode as
docs/architecture.md says.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.resources import PlannedChange

from .ipvs import MODES
from .ipvs_packets import FILLING
from .rollbacks import Rollback
from .states import RANGES, VARIETIES, Change, all_changes, ones, random_changes
from .test_ipvs import without_exceptions as of_ipvs_mode
from .test_modes import IPVS, without_exceptions

full = pytest.mark.full
WAYS = list(itertools.product(MODES, MODES))
_TABLE = "nftables"


def check_of(mode: str, to_mode: str, **more: Any) -> Rollback:
    sources = IPVS.isdisjoint((mode, to_mode))
    filling = FILLING if "iptables" in (mode, to_mode) else ()
    return Rollback(mode, VARIETIES[0], to_mode=to_mode, filling=filling, **{"sources": sources, **more})


def changes_of(check: Rollback, mode: str, to_mode: str, several: list[Change]) -> list[Change]:
    """Return the changes without those that docs/architecture.md excepts; a node that serves nothing has no state."""
    found = [change for change in several if None not in (*change[0], *change[1])]
    if mode != to_mode:
        return without_exceptions(mode, to_mode, check.node, found)
    if mode in IPVS:
        found = of_ipvs_mode(found, check.node)
    excepted = ("external local", *RANGES) if mode == _TABLE else ()
    return [change for change in found if not any(trait in str(change) for trait in excepted)]


@pytest.mark.parametrize(("mode", "to_mode"), WAYS)
@pytest.mark.parametrize("count", [2, pytest.param(15, marks=full)])
def test_the_services_are_others(count: int, mode: str, to_mode: str) -> None:
    check = check_of(mode, to_mode)
    several = [*all_changes()[:: 6480 // count // 4], *random_changes(2, count, 2)]
    check.changes(changes_of(check, mode, to_mode, several)[: 2 * count])
    assert check.faults == [] and check.states > 1


@full
@pytest.mark.parametrize(("mode", "to_mode"), [way for way in WAYS if way[0] != way[1]])
def test_only_the_mode_is_another(mode: str, to_mode: str) -> None:
    check = check_of(mode, to_mode, sources=True)
    check.changes(changes_of(check, mode, to_mode, [((one,), (one,)) for one in ones((0, 2, 3))]))
    assert check.faults == []


# The table beside IPVS records which virtual servers are ours, and must not go before them.
@pytest.mark.parametrize(
    ("mode", "to_mode"),
    [pytest.param(*way, marks=[] if way == (_TABLE, "iptables mode") else full) for way in WAYS],
)
def test_a_crash_after_each_step(mode: str, to_mode: str) -> None:
    check = check_of(mode, to_mode)
    check.crashes(changes_of(check, mode, to_mode, random_changes(3, 4, 1))[:2])
    assert check.faults == []


Plan = list[PlannedChange]
ORDERS: dict[str, Callable[[Plan], Plan]] = {
    "reversed": lambda planned: planned[::-1],
    "nothing restored": lambda planned: [],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("mode", "to_mode"), [("iptables", "iptables"), ("iptables", "nftables mode")])
def test_another_order_is_found(mode: str, to_mode: str, order: str) -> None:
    check = check_of(mode, to_mode, prepare=ORDERS[order])
    check.change((("narrow", 3),), (("open", 1),))
    assert check.faults
