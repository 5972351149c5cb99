# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the scheduler, flags and persistence that annotations give virtual servers."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import ServicePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING as IPTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs import model
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.scheduling import schedule
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.text import virtual_server_line
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.mode import RENDERING as USERSPACE
from tests.unit.rendering.ipvs.test_tables import LOCAL, SETTINGS, render, route

ALL = frozenset(("sh", "mh", "lc", "wrr", "wlc"))


def options(default="rr", usable=ALL, seconds=0, **requested):
    """Return the options of the virtual server as ipvsadm prints them, and what is ignored."""
    info = route(endpoints=[LOCAL], affinity_seconds=seconds, policy=ServicePolicy(**requested))
    tables = render(info, settings=SETTINGS._replace(scheduler=default, schedulers=usable))
    ((key, value),) = tables[model.VIRTUAL_SERVERS].items()
    found = schedule(info, default, usable)
    assert found.server == value
    return virtual_server_line(key, value).partition(" -s ")[2], list(found.ignored)


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("rr", {}),
        ("lc", {"scheduler": "lc"}),
        ("sh", {"scheduler": "sh"}),
        ("sh -b sh-fallback,sh-port", {"scheduler": "sh", "scheduler_flags": ("sh-fallback", "sh-port")}),
        ("mh", {"scheduler": "mh"}),
        ("mh -b mh-port", {"scheduler": "mh", "scheduler_flags": ("flag-2",)}),
        ("mh -b mh-port", {"default": "mh"}),
        ("mh", {"default": "mh", "scheduler": "mh"}),
        ("mh -b mh-fallback", {"default": "mh", "scheduler_flags": ("mh-fallback",)}),
        ("rr -p 60 -M 255.255.255.0", {"seconds": 60, "persistence_v4": 24, "persistence_v6": 64}),
        ("sh -p 60 -b sh-port", {"seconds": 60, "scheduler": "sh", "scheduler_flags": ("sh-port",)}),
    ],
)
def test_options_of_virtual_servers(expected, given):
    assert options(**given) == (expected, [])


@pytest.mark.parametrize(
    ("expected", "reason", "given"),
    [
        ("rr", "this kernel has no scheduler fo; the node's (rr) is used", {"scheduler": "fo"}),
        ("mh -b mh-port", "this kernel has no scheduler fo;", {"default": "mh", "scheduler": "fo"}),
        ("wrr", "IPVS has no scheduler random; the node's (wrr) is used", {"default": "wrr", "scheduler": "random"}),
        ("mh", "scheduler mh has no flag sh-port", {"scheduler": "mh", "scheduler_flags": ("sh-port",)}),
        ("rr", "scheduler rr has no flag sh-port", {"scheduler_flags": ("sh-port",)}),
        ("rr", "a persistence netmask needs sessionAffinity", {"persistence_v4": 24}),
        ("rr", "metadata.annotations[x]: wrong", {"problems": ("metadata.annotations[x]: wrong",)}),
    ],
)
def test_what_cannot_be_done_is_named_and_the_node_s_default_is_used(expected, reason, given):
    found, (ignored,) = options(**given)
    assert (found, ignored[: len(reason)]) == (expected, reason)


def test_only_schedulers_other_than_the_node_s_are_requested_of_the_kernel():
    def requested(scheduler):
        return RENDERING.requested_schedulers(route(policy=ServicePolicy(scheduler=scheduler)), SETTINGS)

    assert [requested(name) for name in ("", "rr", "random", "sh")] == [frozenset()] * 3 + [frozenset(("sh",))]


def test_other_modes_name_what_they_cannot_do():
    policy = ServicePolicy(scheduler="sh", scheduler_flags=("sh-port",), persistence_v4=24)
    info = route(policy=policy)
    assert IPTABLES.ignored_annotation(info, SETTINGS) == [
        "iptables mode has no scheduler sh; its own (random) is used",
        "iptables mode has no persistence netmask; affinity distinguishes every client",
    ]
    assert IPTABLES.ignored_annotation(route(policy=ServicePolicy(scheduler="random")), SETTINGS) == []
    assert USERSPACE.ignored_annotation(route(policy=ServicePolicy(scheduler="rr")), SETTINGS) == []
    assert IPTABLES.requested_schedulers(info, SETTINGS) == frozenset()
