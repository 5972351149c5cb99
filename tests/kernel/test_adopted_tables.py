# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node is taken over while it serves with the tables that kube-proxy had written in nftables mode.

nft loads the recordings of the conformance cases, as v1.36.2 wrote them and as 1.38 would. After each transaction that
makes the table ours, a packet fares as by kube-proxy's rules or as by ours, also where the cluster has changed between
both: then what is programmed belongs to the next step of the case.
"""

from __future__ import annotations

import subprocess
from typing import Any, Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.attributes import attribute_text, number_in
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import attributes as uapi
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import decoding, messages
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import (
    SET_ANONYMOUS,
    Key,
    SetValue,
    Value,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.lab.later_tables import as_1_38
from tests.unit.recordings import Step, steps
from tests.unit.rendering.iptables.test_recordings import NODE_ADDRESSES
from tests.unit.transitions.check import Check, Outcomes, Traversals, described, fates, traversals, wrong
from tests.unit.transitions.nftables import Table
from tests.unit.transitions.states import Node, Packet
from tests.unit.transitions.test_adoption import Side
from tests.unit.transitions.test_seeded_faults import ordering

full = pytest.mark.full
STEPS = list(steps("nftables"))
AT_ONCE = 1 << 30
SERVICE_CIDRS = {"IPv4": "10.96.0.0/12", "IPv6": "fd00:10:96::/112"}
#: The lab changes its own Service once more than it records.
SENTINEL = {"10.111.255.1", "fd00:10:111::1"}


def desired(side: Side, family: str) -> dict[Key, Value]:
    """Return our table of a step, with the addresses for node ports that nftables mode has by default."""
    node, settings = NODE_ADDRESSES[family][1], side.settings
    settings = settings._replace(
        node_port_addresses=settings.node_port_addresses if settings.node_port_cidrs else (node,),
        localhost_node_ports=False,
        service_cidrs=(SERVICE_CIDRS[family],),
    )
    return RENDERING.desired_tables(side.ports, settings)["table objects"]


def anonymous_sets(real: NftablesResource) -> Iterator[tuple[str, SetValue, dict[bytes, Any]]]:
    """Yield the anonymous sets in the table of the kernel, which a resource does not show, with their elements."""
    reader = real._reader()
    for found in list(reader._objects(messages.GET_SET)):
        if number_in(found, uapi.NFTA_SET_FLAGS) & SET_ANONYMOUS:
            name, value = attribute_text(found[uapi.NFTA_SET_NAME]), decoding.parse_set(found)
            yield name, value, reader._ranges(name, value) if value.is_interval else reader.elements(name)


def loaded(text: str) -> dict[str, Table]:
    """Let nft load tables; return what the kernel has then, by family."""
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)
    tables = {}
    for family in FAMILIES:
        with NftablesResource(family) as real:
            table = Table(real.observe())
            for name, value, elements in anonymous_sets(real):
                table.sets[name], table.elements[name] = value, elements
        tables[family] = table
    return tables


def packets_of(family: str, *sides: Side) -> list[Packet]:
    return list(dict.fromkeys(packet for side in sides for packet in side.packets(family)))


def text_of(step: Step) -> str:
    (text,) = (text for command, text in step.saved.items() if command.startswith("nft "))
    return text


def faults(step: Step, later: bool, **more: Any) -> list[str]:
    """Return what goes wrong when the node of a step is taken over, also with what its cluster becomes.

    ``more``: arguments of :class:`Check`.
    """
    following = [each for each in STEPS if (each.case, each.number) == (step.case, step.number + 1)]
    text = text_of(step)
    found: list[str] = []
    for family, start in loaded(as_1_38(text) if later else text).items():
        if start.key is None:
            continue
        before = Side(step, family)
        for after in [before, *(Side(each, family) for each in following)]:
            packets, target = packets_of(family, before, after), desired(after, family)
            ends = traversals(start, packets), traversals(Table(target), packets)
            if after is before:
                kube_proxy, ours = (without_sentinel(fates(end)) for end in ends)
                found += wrong(f"{step}, what kube-proxy serves", kube_proxy, ours, ours)
            found += taken_over(str(step), start, target, ends, family, **more)
    return found


def taken_over(
    where: str, start: Table, target: dict[Key, Value], ends: tuple[Traversals, Traversals], family: str,
    **more: Any,
) -> list[str]:  # fmt: skip
    """Return what goes wrong while a table of kube-proxy becomes ours: at once, step by step, and with a crash."""
    found: list[str] = []
    for most_elements in (AT_ONCE, 1):
        check = Check(Node(family), most_elements, **more)
        held, _now, _crashed = check.applied(where, start, target, ends, ends[0], -1)
        found += [*check.faults, *described(difference(held.observed(), target))]
    crash = check.states // 2
    held, now, _crashed = check.applied(where, start, target, ends, ends[0], crash)
    held, _now, _crashed = check.applied(f"{where}, after a crash", held, target, (now, ends[1]), now, -1)
    return found + check.faults + described(difference(held.observed(), target))


def without_sentinel(outcomes: Outcomes) -> Outcomes:
    return {packet: fate for packet, fate in outcomes.items() if packet.destination not in SENTINEL}


@pytest.mark.parametrize("later", [False, pytest.param(True, marks=full)], ids=["1.36", "1.38"])
@pytest.mark.parametrize(
    "step", [pytest.param(each, id=str(each), marks=full if at % 9 else ()) for at, each in enumerate(STEPS)]
)
def test_a_node_of_kube_proxy_is_taken_over(step: Step, later: bool) -> None:
    assert faults(step, later) == []


#: A takeover removes whole sets, and no single elements, so orders of these make no difference.
ORDERS = ("every one cut in two", "chains flushed alone", "removals first", "the middle one missing")


@pytest.mark.parametrize("order", ORDERS)
def test_another_order_of_the_transactions_is_found(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    (step,) = (each for each in STEPS if str(each) == "nodeport-cluster-0")
    assert faults(step, False, prepare=ordering(order))
