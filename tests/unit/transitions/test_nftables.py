# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The transactions of nftables mode: after each of them, every packet fares as before the change or as after it."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import resource
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import LocalTraffic

from .check import Check
from .states import VARIETIES, Node, all_changes, ones, pair_changes, random_changes, sample

full = pytest.mark.full
EVERY = 1 << 30


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing wait for chains that are still referred to."""
    monkeypatch.setattr(resource, "_BUSY_SECONDS", 0)


@pytest.mark.parametrize("node", VARIETIES, ids=str)
def test_one_service(node: Node) -> None:
    check = Check(node)
    check.changes(sample(20))
    check.changes(pair_changes(1, 20))
    assert check.faults == []


def test_a_restriction_ends_together_with_the_chain_that_is_replaced() -> None:
    """The frontend leads to the same chain, whose rules remember other clients."""
    check = Check()
    for old, new in ((("wide+affinity", 3), ("open+affinity", 2)), (("open+affinity", 2), ("wide+affinity", 3))):
        check.change((old,), (new,))
    assert check.faults == []


@full
def test_every_change_of_one_service() -> None:
    check = Check()
    check.changes(all_changes())
    assert check.faults == []


@full
@pytest.mark.parametrize("node", VARIETIES, ids=str)
def test_every_pair_of_traits(node: Node) -> None:
    check = Check(node)
    check.changes(pair_changes(2, 500))
    assert check.faults == []


@pytest.mark.parametrize("old_kernel", [False, True])
@pytest.mark.parametrize(("services", "most_elements", "count"), [(2, 2, 15), (3, 4, 10), (3, EVERY, 20)])
def test_several_services(services: int, most_elements: int, count: int, old_kernel: bool) -> None:
    check = Check(VARIETIES[services], most_elements, old_kernel)
    check.changes(random_changes(services, count, services))
    assert check.faults == []


@full
@pytest.mark.parametrize("old_kernel", [False, True])
@pytest.mark.parametrize("node", VARIETIES, ids=str)
@pytest.mark.parametrize("most_elements", [1, 2, 3, 5, EVERY])
def test_many_changes_of_several_services(node: Node, most_elements: int, old_kernel: bool) -> None:
    check = Check(node, most_elements, old_kernel)
    for services in (2, 3):
        check.changes(random_changes(most_elements, 25, services))
    assert check.faults == []


@pytest.mark.parametrize("old_kernel", [False, True])
def test_a_crash_after_each_transaction(old_kernel: bool) -> None:
    check = Check(old_kernel=old_kernel)
    check.crashes(sample(4))
    check.crashes(random_changes(3, 1, 2))
    assert check.faults == []


@full
@pytest.mark.parametrize("node", VARIETIES, ids=str)
@pytest.mark.parametrize("most_elements", [1, 3])
def test_a_crash_after_each_transaction_of_many_changes(node: Node, most_elements: int) -> None:
    check = Check(node, most_elements)
    check.crashes(sample(40))
    check.crashes(random_changes(5, 5, 3))
    assert check.faults == []


@pytest.mark.parametrize("most_elements", [1, 3, EVERY])
def test_the_first_load_and_the_clean_up(most_elements: int) -> None:
    """A node that serves nothing has no table; a crash may leave a part of the first one."""
    state = tuple(one for one in ones((3,)) if one)
    check = Check(most_elements=most_elements)
    check.change(None, state)
    check.change(state, None)
    check.crashes([(None, state[8:10])])  # type: ignore[list-item]
    assert check.faults == []


@pytest.mark.parametrize(
    "changes",
    [
        {"count_connections": True},
        {"count_bytes": True},
        {"masquerade_all": True},
        {"masquerade_mark": 1},
        {"node_port_cidrs": (), "node_port_addresses": ()},
        {"local_traffic": LocalTraffic("name", "cni0")},
        {"localhost_rejected": ("udp",)},
        {"schedulers": frozenset()},
        {"service_cidrs": ()},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("most_elements", [1, EVERY])
def test_other_settings(changes: dict, most_elements: int) -> None:
    """The configuration and Services change in one run of the program, in either direction."""
    other = Node(changes=tuple(changes.items()))
    for old, new in random_changes(6, 4, 2):
        for here, there in ((Node(), other), (other, Node())):
            check = Check(here, most_elements)
            check.change(old, new, to=there)
            assert check.faults == []


@pytest.mark.parametrize(("here", "there"), [(VARIETIES[0], VARIETIES[1]), (VARIETIES[3], VARIETIES[2])])
def test_another_behaviour(here: Node, there: Node) -> None:
    check = Check(here)
    for old, new in [*pair_changes(7, 15), *random_changes(7, 5, 2)]:
        check.change(old, new, to=there)
    assert check.faults == []
