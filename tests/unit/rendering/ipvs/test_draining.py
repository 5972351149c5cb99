# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Draining of real servers, and external virtual servers, as functions of the observed state."""

from __future__ import annotations

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import parse_network
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.draining import with_draining, with_excluded
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServer,
    RealServerKey,
    VirtualServer,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference

TCP = VirtualServerKey("tcp", "10.96.0.1", 80)
UDP = VirtualServerKey("udp", "10.96.0.1", 53)
SCTP = VirtualServerKey("sctp", "10.96.0.1", 99)
SETTINGS = VirtualServer("rr", 0, 0, 32)
WANTED, DRAINING = RealServer(1), RealServer(0)


def real(server: VirtualServerKey, number: int = 1) -> RealServerKey:
    return RealServerKey(server, f"10.244.1.{number}", 80)


def test_a_real_server_without_connections_is_removed_at_once():
    assert with_draining({}, {real(TCP): WANTED}, {}, {TCP}) == {}


def test_a_real_server_with_connections_is_kept_at_weight_zero_until_they_end():
    observed = {real(TCP): WANTED, real(TCP, 2): WANTED}
    connections = {real(TCP): 3, real(TCP, 2): 1}
    desired = with_draining({real(TCP, 2): WANTED}, observed, connections, {TCP})
    assert desired == {real(TCP): DRAINING, real(TCP, 2): WANTED}
    change = difference(observed, desired)
    assert change.replaced == {real(TCP): (WANTED, DRAINING)} and not change.added and not change.removed
    # The next run changes nothing while connections exist, and removes the real server afterwards.
    assert not difference(desired, with_draining({real(TCP, 2): WANTED}, desired, {real(TCP): 1}, {TCP}))
    ended = difference(desired, with_draining({real(TCP, 2): WANTED}, desired, {}, {TCP}))
    assert ended.removed == {real(TCP): DRAINING}


def test_udp_and_sctp_are_not_drained():
    observed = {real(UDP): WANTED, real(SCTP): WANTED}
    assert with_draining({}, observed, {real(UDP): 5, real(SCTP): 5}, {UDP, SCTP}) == {}


def test_real_servers_of_a_removed_virtual_server_are_not_drained():
    assert with_draining({}, {real(TCP): WANTED}, {real(TCP): 5}, set()) == {}


def test_a_real_server_desired_again_regains_its_weight():
    desired = with_draining({real(TCP): WANTED}, {real(TCP): DRAINING}, {real(TCP): 5}, {TCP})
    assert difference({real(TCP): DRAINING}, desired).replaced == {real(TCP): (DRAINING, WANTED)}


def test_draining_keeps_the_forwarding_method():
    observed = {real(TCP): RealServer(4, "route")}
    assert with_draining({}, observed, {real(TCP): 1}, {TCP}) == {real(TCP): RealServer(0, "route")}


def test_connections_of_unobserved_real_servers_are_ignored():
    assert with_draining({}, {}, {real(TCP): 1}, {TCP}) == {}


def test_excluded_virtual_servers_and_their_real_servers_are_unchanged():
    external = VirtualServerKey("tcp", "10.250.0.1", 80)
    ours = VirtualServerKey("tcp", "10.250.0.2", 80)
    stale = VirtualServerKey("tcp", "10.251.0.1", 80)
    networks = [network for network in map(parse_network, ("10.250.0.0/24", "fd00::/64")) if network]
    odd = VirtualServer("wlc", 1, 60, 24)
    observed = {external: odd, ours: odd, stale: odd}
    desired = with_excluded({ours: SETTINGS}, observed, {ours}, networks)
    assert desired == {ours: SETTINGS, external: odd}
    observed_real = {real(external): RealServer(7, "tunnel"), real(ours): WANTED, real(stale): WANTED}
    wanted = with_excluded({real(ours, 2): WANTED}, observed_real, {ours}, networks)
    assert wanted == {real(ours, 2): WANTED, real(external): RealServer(7, "tunnel")}
    assert with_excluded({}, observed, (), ()) == {}
    assert with_excluded({}, observed_real, (), ()) == {}
