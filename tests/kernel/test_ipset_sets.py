# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ipsets on a real kernel, verified with the ipset tool."""

from __future__ import annotations

import random
import re
import subprocess
from typing import Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipset.sets import (
    IpsetSocket,
    SetElementsResource,
    SetsResource,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import SetDefinition, SetElementKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.sets import definitions
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.text import ipset_text
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, Stage, apply_plan, plan
from tests.lab.system import run

pytestmark = pytest.mark.uml

FAMILIES = ("IPv4", "IPv6")
Elements = dict[SetElementKey, bool]


@pytest.fixture
def ipset() -> Iterator[IpsetSocket]:
    with IpsetSocket() as sock:
        yield sock


def saved() -> set[str]:
    return {re.sub(r" (bucketsize|initval) \w+", "", line) for line in run(["ipset", "save"]).splitlines() if line}


def converge(sock: IpsetSocket, sets: dict[str, SetDefinition], elements: Elements, family: str = "IPv4") -> int:
    known = definitions(family)
    resources = SetsResource(sock, known, family), SetElementsResource(sock, known, family)
    planned = plan([Stage(resources[0], sets), Stage(resources[1], elements)])
    apply_plan(planned)
    return sum(len(one.change) for one in planned)


def random_elements(seed: int, family: str) -> Elements:
    chance = random.Random(seed)

    def address() -> str:
        return f"10.96.0.{chance.randint(1, 99)}" if family == "IPv4" else f"fd00:96::{chance.randint(1, 99)}"

    def place() -> str:
        return f"{address()},{chance.choice(('tcp', 'udp', 'sctp'))}:{chance.choice((1, 80, 65535))}"

    network = {"IPv4": ("10.0.0.0/8", "192.0.2.7", "192.0.2.128/25"), "IPv6": ("fd00::/16", "fd00::7", "2001:db8::/33")}
    makers = {
        "hash:ip": address,
        "hash:ip,port": place,
        "hash:ip,port,ip": lambda: f"{place()},{address()}",
        "hash:ip,port,net": lambda: f"{place()},{chance.choice(network[family])}",
        "bitmap:port": lambda: str(chance.randint(0, 65535)),
    }
    found: Elements = {}
    for name, definition in definitions(family).items():
        for _number in range(chance.randint(0, 30)):
            found[SetElementKey(name, makers[definition.type]())] = True
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_any_state_is_reached_from_any_other(ipset, family, seed):
    run(["ipset", "create", "EXTERNAL", "hash:net"])
    run(["ipset", "add", "EXTERNAL", "10.0.0.0/8"])
    external = saved()
    known = definitions(family)
    first, second = random_elements(seed, family), random_elements(seed + 100, family)
    for state in (first, second, first):
        assert converge(ipset, known, state, family) > 0
        assert saved() == external | set(ipset_text(known, state).splitlines())
        assert converge(ipset, known, state, family) == 0
    converge(ipset, {}, {}, family)
    assert saved() == external


def test_families_do_not_affect_each_other(ipset):
    states = {family: (definitions(family), random_elements(5, family)) for family in FAMILIES}
    for family, (sets, elements) in states.items():
        converge(ipset, sets, elements, family)
    for family, (sets, elements) in states.items():
        assert converge(ipset, sets, elements, family) == 0
    converge(ipset, {}, {}, "IPv4")
    assert saved() == set(ipset_text(*states["IPv6"]).splitlines())


def test_saved_text_restores_to_the_same_sets(ipset):
    known, elements = definitions("IPv4"), random_elements(9, "IPv4")
    subprocess.run(["ipset", "restore"], input=ipset_text(known, elements), text=True, check=True)
    assert converge(ipset, known, elements) == 0


def test_a_full_set_is_named_and_other_sets_are_still_filled(ipset):
    known = definitions("IPv4")
    converge(ipset, known, {})
    elements = {SetElementKey("KUBE-IPVS-IPS", f"11.{n >> 16}.{n >> 8 & 255}.{n & 255}"): True for n in range(90_000)}
    elements[SetElementKey("KUBE-NODE-PORT-TCP", "30080")] = True
    expected = r"set KUBE-IPVS-IPS: element 11\.\S+ cannot be added: the set is full \(65536 elements at most\)"
    with pytest.raises(KernelError, match=expected):
        SetElementsResource(ipset, known, "IPv4").apply(Change(added=elements))
    assert "30080" in run(["ipset", "list", "KUBE-NODE-PORT-TCP"])


def test_adding_existing_and_deleting_missing_elements_succeeds(ipset):
    known, elements = definitions("IPv4"), random_elements(3, "IPv4")
    sets, content = SetsResource(ipset, known, "IPv4"), SetElementsResource(ipset, known, "IPv4")
    for _repeat in range(2):
        sets.apply(Change(added=dict(known)))
        content.apply(Change(added=dict(elements)))
    for _repeat in range(2):
        content.apply(Change(removed=dict(elements)))
    for _repeat in range(2):
        sets.apply(Change(removed=dict(known)))
    content.apply(Change(removed=dict(elements)))
    assert saved() == set()


def test_a_set_of_another_size_is_swapped_under_the_rules_that_use_it(ipset):
    known = definitions("IPv4")
    run(["ipset", "create", "KUBE-IPVS-IPS", "hash:ip", "maxelem", "100"])
    run(["ipset", "add", "KUBE-IPVS-IPS", "10.96.0.1"])
    run(["iptables-legacy", "-A", "INPUT", "-m", "set", "--match-set", "KUBE-IPVS-IPS", "dst", "-j", "DROP"])
    elements = {SetElementKey("KUBE-IPVS-IPS", "10.96.0.1"): True}
    assert converge(ipset, known, elements) > 0
    assert converge(ipset, known, elements) == 0
    assert saved() == set(ipset_text(known, elements).splitlines())
    with pytest.raises(KernelError, match="set KUBE-IPVS-IPS cannot be removed: it is in use"):
        converge(ipset, {}, {})
    run(["iptables-legacy", "-F", "INPUT"])


def test_a_set_of_another_type_is_not_touched(ipset):
    run(["ipset", "create", "KUBE-CLUSTER-IP", "hash:net"])
    expected = "it exists as hash:net IPv4, expected hash:ip,port IPv4; run: ipset destroy KUBE-CLUSTER-IP"
    with pytest.raises(KernelError, match=re.escape(expected)):
        converge(ipset, definitions("IPv4"), {})
    assert saved() == {"create KUBE-CLUSTER-IP hash:net family inet hashsize 1024 maxelem 65536"}


def test_elements_of_a_missing_set_are_an_error(ipset):
    key = SetElementKey("KUBE-IPVS-IPS", "10.96.0.1")
    with pytest.raises(KernelError, match="set KUBE-IPVS-IPS: elements cannot be added: the set does not exist"):
        SetElementsResource(ipset, definitions("IPv4"), "IPv4").apply(Change(added={key: True}))
