# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""In ipvs mode packets fare between two steps as docs/architecture.md says, and the check finds seeded faults."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes import ipvs as mode_module
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipset import sets
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipset.sets import SetElementsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.servers import (
    RealServersResource,
    VirtualServersResource,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.ipvs_table import IpvsTableResource
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.draining import with_draining
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import NO_CHANGE, Kind, PlannedChange

from .ipvs_packets import FILLING, Check, arrivals, fates
from .states import (
    PAIRS,
    RANGES,
    VARIETIES,
    Change,
    Node,
    State,
    all_changes,
    ones,
    packets,
    pair_changes,
    random_changes,
    ranges_of,
    sample,
)

full = pytest.mark.full
FILTER_BACKENDS = {"iptables": FILLING, "nftables": ()}
both = pytest.mark.parametrize("name", FILTER_BACKENDS)
_OTHERS = [pytest.param(node, id=str(node), marks=full) for node in VARIETIES[1:3]]
varieties = pytest.mark.parametrize("node", [VARIETIES[0], *_OTHERS, VARIETIES[3]], ids=str)


def check_of(name: str, node: Node = VARIETIES[0], **more: Any) -> Check:
    return Check(name, node, filling=FILTER_BACKENDS[name], **more)


@both
def test_changes_of_one_service(name: str) -> None:
    check = check_of(name)
    check.changes(sample(12))
    assert check.faults == [] and check.states > 50


PLAIN, CORRECTED = VARIETIES[:2]
OTHERWISE = [(PLAIN, CORRECTED), (CORRECTED, PLAIN)]
OTHERWISE += [
    (PLAIN, PLAIN._replace(changes=(change,))) for change in (("masquerade_all", True), ("local_traffic", None))
]


@both
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=full)])
@pytest.mark.parametrize(("node", "to"), OTHERWISE)
def test_the_behaviour_or_a_setting_changes(node: Node, to: Node, every: int, name: str) -> None:
    check = check_of(name, node)
    for one in ones((3,))[every::every]:
        check.change((one,), (one,), to=to)
    assert check.faults == []


@both
@varieties
def test_changes_of_services_with_connections(node: Node, name: str) -> None:
    check = check_of(name, node, connected=True)
    check.changes([*pair_changes(3, len(PAIRS))[:4], *random_changes(2, 2, 2)])
    assert check.faults == []


@full
@both
@pytest.mark.parametrize("part", range(20))
def test_all_changes_of_one_service(name: str, part: int) -> None:
    check = check_of(name)
    check.changes(without_exceptions(all_changes()[part::20], check.node))
    assert check.faults == []


def _is_excepted(change: Change, node: Node) -> bool:
    """Return whether docs/architecture.md excepts a change: other ranges and endpoints at once, redirected clients."""
    if node.behaviour != "kube-proxy":
        return any(trait in str(change) for trait in ("external local", *RANGES))
    ones_of = ((old, new) for old, new in zip(*change) if old and new and old[1] != new[1])
    return any(ranges_of(old) and ranges_of(new) and ranges_of(old) != ranges_of(new) for old, new in ones_of)


def without_exceptions(changes: Iterable[Change], node: Node) -> list[Change]:
    return [change for change in changes if not _is_excepted(change, node)]


@full
@both
@pytest.mark.parametrize("node", VARIETIES, ids=str)
def test_many_changes(node: Node, name: str) -> None:
    changes = [*pair_changes(5, 150), *random_changes(6, 50, 2), *random_changes(7, 20, 3)]
    for connected in (False, True):
        check = check_of(name, node, connected=connected)
        check.changes(without_exceptions(changes, node))
        assert check.faults == []


@both
@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("count", [2, pytest.param(40, marks=full)])
def test_a_crash_after_each_step_and_each_message_refused(name: str, refuses: bool, count: int) -> None:
    check = check_of(name, refuses=refuses)
    check.crashes([*sample(count), *random_changes(count, count // 20, 2)])
    assert check.faults == [] and check.states > 18 * count


@both
def test_ranges_without_a_refused_element_are_not_in_force(name: str) -> None:
    check = check_of(name, refuses=True)
    check.crashes([((("hashed", 2),), (("allowed", 1),)), ((("allowed", 1),), (("hashed", 2),))])
    assert check.faults == []


def test_the_first_load() -> None:
    """Only with nftables: the chains of the filter backend iptables follow the first element of each set."""
    check = check_of("nftables")
    check.changes([(None, state) for state in ((("narrow+external IP", 3),), (("external local", 3),))])
    check.crashes([(None, (("allowed", 3),))])
    assert check.faults == []


@varieties
def test_both_filter_backends_do_the_same(node: Node) -> None:
    """Except for connections of the node itself to a port without endpoints whose source ranges exclude it."""
    several = [Check(name, node) for name in FILTER_BACKENDS]
    for one in [*ones((0, 3)), *ones(traits=PAIRS)[::61]]:
        found = [fates(arrivals(check.loaded((one,), node), packets(1, node.family))) for check in several]
        differing = {packet: (way, found[1][packet]) for packet, way in found[0].items() if way != found[1][packet]}
        assert not one or not one[1] or differing == {}


Plan = list[PlannedChange]


def _moved(kind: str, position: int) -> Callable[[Plan], Plan]:
    def prepare(planned: Plan) -> Plan:
        rest = [item for item in planned if item.resource.kind != kind]
        rest.insert(position if position >= 0 else len(rest), *(item for item in planned if item.resource.kind == kind))
        return rest

    return prepare


ORDERS: dict[str, Callable[[Plan], Plan]] = {
    "reversed": lambda planned: planned[::-1],
    "addresses first": _moved(Kind.ADDRESSES, 0),
    "real servers first": _moved(Kind.REAL_SERVERS, 0),
    "the table last": _moved(Kind.IPVS_OBJECTS, -1),
    "addresses not changed": lambda planned: [each for each in planned if each.resource.kind != Kind.ADDRESSES],
}


def _at_once(_resource: Any, change: Any) -> Any:
    return change, NO_CHANGE


def _all_alike(_resource: Any, change: Any) -> Any:
    return change.passes()


SEEDED: dict[str, Any] = {
    "the table in one transaction": ("nftables", IpvsTableResource, "passes", _at_once),
    "sources kept too early": ("nftables", IpvsTableResource, "passes", _all_alike),
    "sources kept too early by sets": ("iptables", SetElementsResource, "passes", _all_alike),
    "ranges after what they restrict": ("iptables", sets, "sorted", lambda items, **_reverse: sorted(items)),
    "virtual servers removed at once": ("nftables", VirtualServersResource, "atomic", True),
    "real servers removed at once": ("nftables", RealServersResource, "atomic", True),
    "drained servers with their weight": (
        "nftables",
        mode_module,
        "with_draining",
        lambda desired, observed, *rest: {**observed, **with_draining(desired, observed, *rest), **desired},
    ),
}


def found(name: str, **more: Any) -> bool:
    """Return whether the check finds anything in a sample of changes."""
    check = check_of(name, **more)
    ones_of = [("narrow", 5), ("external local", 3), ("weights", 1), ("open", 2), ("other port", 1), None]
    chosen: list[State] = [(one,) for one in ones_of]
    for old, new in zip(chosen, [*chosen[1:], *chosen[:1]]):
        for change in ((old, new), (new, old)):
            check.change(*change)
            if check.faults:
                return True
    return False


@pytest.mark.parametrize("more", [{}, {"connected": True}], ids=str)
@both
def test_nothing_is_found_without_a_fault(name: str, more: dict[str, Any]) -> None:
    assert not found(name, **more)


@pytest.mark.parametrize("order", ORDERS)
def test_another_order_is_found(order: str) -> None:
    assert found("nftables", prepare=ORDERS[order])


@pytest.mark.parametrize("fault", SEEDED)
def test_a_seeded_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, holder, attribute, value = SEEDED[fault]
    monkeypatch.setattr(holder, attribute, value, raising=False)
    assert found(name, connected="drained" in fault)
