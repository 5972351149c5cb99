# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which endpoint is chosen, and which clients source ranges admit."""

from __future__ import annotations

import ipaddress
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import is_admitted
from ansible_collections.kubenode.proxy.plugins.module_utils.forwarding.balancing import (
    MOST_COUNTED,
    Balancer,
    FailedEndpoints,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.forwarding.limits import Limits, within_files
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.model import Listener
from tests.lab.clock import Clock

A, B, C = ("10.0.0.1", 80), ("10.0.0.2", 80), ("10.0.0.3", 80)


@pytest.fixture
def clock():
    return Clock(0.0)


@pytest.fixture
def failed(clock):
    return FailedEndpoints(5.0, clock)


@pytest.fixture
def balancer(failed, clock):
    return Balancer(failed, 100, clock)


def test_endpoints_are_used_in_turn(balancer):
    listener = Listener("a/b", (A, B, C))
    chosen = [balancer.choose(listener, "x") for _number in range(300)]
    assert {endpoint: chosen.count(endpoint) for endpoint in (A, B, C)} == {A: 100, B: 100, C: 100}


def test_every_endpoint_is_tried_once(balancer):
    listener, tried = Listener("a/b", (A, B, C)), []
    while True:
        endpoint = balancer.choose(listener, "x", tried)
        if endpoint is None:
            break
        tried.append(endpoint)
    assert sorted(tried) == [A, B, C]


def test_an_endpoint_that_failed_is_used_only_if_no_other_is_left(balancer, failed, clock):
    listener = Listener("a/b", (A, B))
    failed.add(A)
    assert {balancer.choose(listener, "x") for _number in range(10)} == {B}
    failed.add(B)
    assert balancer.choose(listener, "x") in (A, B)
    failed.discard(A)
    assert {balancer.choose(listener, "x") for _number in range(10)} == {A}
    clock.now = 5.0
    assert {balancer.choose(listener, "x") for _number in range(10)} == {A, B}
    failed.expire()
    assert len(failed) == 0


def test_affinity_lasts_from_the_last_connection(balancer, clock):
    listener = Listener("a/b", (A, B, C), 10)
    first = balancer.choose(listener, "x")
    for _number in range(5):
        clock.now += 9.0
        assert balancer.choose(listener, "x") == first
    clock.now += 10.0
    assert balancer.choose(listener, "x") != first


def test_affinity_moves_if_the_endpoint_is_removed_or_failed(balancer):
    listener = Listener("a/b", (A, B), 10)
    first = balancer.choose(listener, "x")
    other = B if first == A else A
    assert balancer.choose(listener, "x", [first]) == other
    assert balancer.choose(listener, "x") == other
    assert balancer.choose(listener._replace(endpoints=(first,)), "x") == first


def test_the_number_of_remembered_clients_is_limited(balancer):
    listener = Listener("a/b", (A, B), 10)
    for number in range(1000):
        balancer.choose(listener, str(number))
    assert len(balancer) == 100


def test_clients_are_forgotten_when_their_affinity_ends(balancer, clock):
    listener = Listener("a/b", (A, B), 10)
    for number in range(50):
        balancer.choose(listener, str(number))
    clock.now = 9.0
    balancer.choose(listener, "0")
    clock.now = 10.0
    balancer.choose(listener, "x")
    assert len(balancer) == 2
    balancer.choose(listener._replace(affinity_seconds=0), "x")
    assert len(balancer) == 0


def test_the_endpoints_whose_connections_are_counted_are_limited(balancer):
    for number in range(MOST_COUNTED):
        balancer.count((str(ipaddress.ip_address(number)), 80))
    balancer.count(("0.0.0.0", 80))
    balancer.count(A)
    assert len(balancer.opened) == MOST_COUNTED
    assert (balancer.opened["0.0.0.0", 80], balancer.opened[A]) == (2, 1)
    assert ("0.0.0.1", 80) not in balancer.opened


def test_limits_leave_files_to_the_rest_of_the_agent():
    for files in (1024, 4096, 65536, 1 << 20):
        limits = within_files(Limits(), files, others=2048)
        used = 2 * limits.connections + limits.sessions + limits.listeners
        assert used <= max(64, files - 2048)
        assert limits.connections >= 16


@pytest.mark.parametrize(
    ("sources", "client", "allowed"),
    [
        ((), "192.0.2.1", True),
        (("192.0.2.0/24",), "192.0.2.1", True),
        (("192.0.2.0/24",), "192.0.3.1", False),
        (("fd00::/8", "2001:db8::/32"), "2001:db8::1", True),
        (("192.0.2.0/24",), "fe80::1%eth0", False),
    ],
)
def test_source_ranges(sources, client, allowed):
    assert is_admitted(client, sources) is allowed


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 32)), min_size=1, max_size=8), st.integers(0, 255))
def test_source_ranges_admit_the_addresses_they_contain(given_ranges, last):
    networks = [ipaddress.ip_network((0xC0000200 | number, length), strict=False) for number, length in given_ranges]
    client = ipaddress.ip_address(0xC0000200 | last)
    assert is_admitted(str(client), tuple(map(str, networks))) is any(client in network for network in networks)


def test_many_source_ranges_do_not_slow_down_datagrams():
    sources = tuple(f"10.{number >> 8}.{number & 255}.0/24" for number in range(20_000))
    assert is_admitted("10.78.31.1", sources)
    began = time.process_time()
    assert not any(is_admitted("192.0.2.1", sources) for _datagram in range(1000))
    assert time.process_time() - began < 5.0
