# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test which annotations of a Service apply, and that invalid ones are named while the Service is served."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.static import parse_static
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import ServicePolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import (
    NodeContext,
    all_service_ports,
    count_endpoints,
)

OWN = "kubenode.proxy/scheduler"
FLAGS = "kubenode.proxy/scheduler-flags"
MODE = "kubenode.proxy/mode"
NETMASK = "kubenode.proxy/persistence-netmask"
KUBE_ROUTER = "kube-router.io/service.scheduler"
KUBE_ROUTER_FLAGS = "kube-router.io/service.schedflags"
CILIUM = "service.cilium.io/lb-algorithm"
ALIASES = ServicePolicySettings(aliases=True)


def policy_of(annotations, settings=None):
    """Return the policy of the Service's only ServicePort, and what was skipped."""
    raw = {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {"namespace": "shop", "name": "web", "annotations": annotations},
        "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]},
    }
    state = ClusterState.from_objects([prune(raw)])
    context = NodeContext(IPV4, "n", policy=settings or ServicePolicySettings())
    (info,) = all_service_ports(state, context).values()
    return info.policy, [str(item) for item in state.skipped]


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({OWN: "lc"}, ("lc", (), 0, 0)),
        ({OWN: "maglev"}, ("mh", (), 0, 0)),
        ({OWN: "sh", FLAGS: " sh-port,sh-fallback "}, ("sh", ("sh-fallback", "sh-port"), 0, 0)),
        ({FLAGS: ""}, ("", (), 0, 0)),
        ({NETMASK: "24"}, ("", (), 24, 0)),
        ({NETMASK: "24,64"}, ("", (), 24, 64)),
        ({"example.com/scheduler": "lc"}, ("", (), 0, 0)),
    ],
)
def test_annotations_of_a_service(annotations, expected):
    policy, skipped = policy_of(annotations)
    found = (policy.scheduler, policy.scheduler_flags, policy.persistence_v4, policy.persistence_v6)
    assert (found, skipped) == (expected, [])


@pytest.mark.parametrize(
    "value", ["ftp", "", "LC", "rr,lc", 7, None, True, ["lc"], "l\u200bc", "x" * 9999, "lc\x1b[2J"]
)
def test_an_invalid_scheduler_is_named_and_the_rest_of_the_annotations_counts(value):
    policy, skipped = policy_of({OWN: value, NETMASK: "16"})
    assert (policy.scheduler, policy.persistence_v4) == ("", 16)
    (line,) = skipped
    assert line.startswith(f"Service shop/web: metadata.annotations[{OWN}]: ") and "is not one of rr, wrr" in line
    assert line.isprintable() and len(line) < 400


@pytest.mark.parametrize(
    "value",
    [
        *("0", "33", "24,0", "24,129", "24,64,1", "", "-1", "1e1", "x", "\u0662\u0664", "24.0", "9" * 5000),
        24,
        None,
        True,
    ],
)
def test_an_invalid_netmask_is_named(value):
    policy, (line,) = policy_of({OWN: "lc", NETMASK: value})
    assert (policy.scheduler, policy.persistence_v4, policy.persistence_v6) == ("lc", 0, 0)
    assert NETMASK in line


def test_an_invalid_flag_is_named_once_and_the_others_count():
    policy, (line,) = policy_of({OWN: "mh", FLAGS: "mh-port," + "x," * 1000})
    assert policy.scheduler_flags == ("mh-port",)
    assert line.startswith(f'Service shop/web: metadata.annotations[{FLAGS}]: "x" is not one of sh-fallback')


def test_aliases_count_only_where_the_node_says_so():
    annotations = {KUBE_ROUTER: "sh", KUBE_ROUTER_FLAGS: "flag-1,sh-port", CILIUM: "maglev"}
    assert policy_of(annotations)[0].scheduler == ""
    policy, skipped = policy_of(annotations, ALIASES)
    assert (policy.scheduler, policy.scheduler_flags, policy.problems) == ("sh", ("flag-1", "sh-port"), ())
    assert policy_of({CILIUM: "maglev"}, ALIASES)[0].scheduler == "mh"
    assert policy_of({CILIUM: "random"}, ALIASES)[0].scheduler == "random"
    assert skipped == []


def test_own_annotations_win_over_aliases():
    policy, _skipped = policy_of({OWN: "lc", KUBE_ROUTER: "sh", KUBE_ROUTER_FLAGS: "sh-port"}, ALIASES)
    assert (policy.scheduler, policy.scheduler_flags) == ("lc", ())
    policy, _skipped = policy_of({FLAGS: "sh-fallback", KUBE_ROUTER: "sh", KUBE_ROUTER_FLAGS: "sh-port"}, ALIASES)
    assert (policy.scheduler, policy.scheduler_flags) == ("sh", ("sh-fallback",))


def test_what_is_invalid_in_an_alias_matters_only_where_aliases_count():
    annotations = {KUBE_ROUTER: "bogus", CILIUM: "lc"}
    policy, skipped = policy_of(annotations)
    assert (policy.problems, skipped) == ((), [])
    policy, skipped = policy_of(annotations, ALIASES)
    assert (policy.scheduler, skipped) == ("", [])
    assert [problem.partition(": ")[0] for problem in policy.problems] == [
        f"metadata.annotations[{KUBE_ROUTER}]",
        f"metadata.annotations[{CILIUM}]",
    ]


@pytest.mark.parametrize(
    "settings",
    [
        ServicePolicySettings(annotations_enabled=False, aliases=True),
        ServicePolicySettings(annotated_namespaces=("other",), aliases=True),
    ],
)
def test_annotations_can_be_switched_off(settings):
    policy, _skipped = policy_of({OWN: "lc", KUBE_ROUTER: "bogus"}, settings)
    assert policy == type(policy)()


@pytest.mark.parametrize(
    ("labels", "settings", "left"),
    [
        ({}, ServicePolicySettings(), False),
        ({}, ServicePolicySettings(local_services=("shop/web",)), True),
        ({}, ServicePolicySettings(local_services=("shop/web2", "web/shop")), False),
        ({"kubenode.proxy/node-local": "true"}, ServicePolicySettings(), True),
        ({"kubenode.proxy/node-local": "false"}, ServicePolicySettings(), False),
        ({"kubenode.proxy/node-local": "true"}, ServicePolicySettings(annotations_enabled=False), False),
        ({"kubenode.proxy/node-local": "true"}, ServicePolicySettings(annotated_namespaces=("other",)), False),
    ],
)
def test_services_that_are_left_to_programs_on_the_node(labels, settings, left):
    service = {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {"namespace": "shop", "name": "web", "labels": labels},
        "spec": {"clusterIP": "10.96.0.1", "externalIPs": ["192.0.2.1"], "ports": [{"port": 80}]},
    }
    endpoints = {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"namespace": "shop", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 8080}],
        "endpoints": [{"addresses": ["10.244.1.5"]}],
    }
    state = ClusterState.from_objects([prune(service), prune(endpoints)])
    found = all_service_ports(state, NodeContext(IPV4, "n", policy=settings))
    assert bool(found) is not left
    (name,) = state.services
    assert count_endpoints(state, name, IPV4, policy=settings) == (0 if left else 1)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("30s", 30.0), ("2m", 120.0), ("5s", 5.0), ("4s", 0.0), ("61m", 0.0), ("30", 0.0), ("", 0.0), (30, 0.0)]
    + [
        (value, 0.0)
        for value in ("-30s", "\u0663\u0660s", "1e9s", "infs", "nans", "9" * 5000 + "s", None, True, ["30s"])
    ],
)
def test_slow_start_is_a_duration(value, seconds):
    policy, skipped = policy_of({"kubenode.proxy/slow-start": value, OWN: "lc"})
    assert (policy.slow_start, policy.scheduler) == (seconds, "lc")
    assert len(skipped) == (not seconds)


@pytest.mark.parametrize(
    "settings", [ServicePolicySettings(), ServicePolicySettings(annotations_enabled=False)], ids=["on", "off"]
)
def test_only_a_static_service_has_userspace_mode(settings):
    annotations = {MODE: "userspace"}
    policy, skipped = policy_of(annotations, settings)
    assert not policy.userspace and not skipped
    assert policy.problems == ((f"{MODE} is for static Services only",) if settings.annotations_enabled else ())
    manifest = {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {"name": "apiserver", "annotations": annotations},
        "spec": {"clusterIP": "10.103.97.2", "ports": [{"port": 6443}]},
    }
    state = ClusterState()
    state.set_static(parse_static({"a.json": [manifest]}))
    (info,) = all_service_ports(state, NodeContext(IPV4, "n", policy=settings)).values()
    assert info.policy.userspace and not info.policy.problems


@pytest.mark.parametrize("value", ["Userspace", "nftables", "", 7])
def test_another_mode_is_named_and_the_node_has_its_own(value):
    policy, (line,) = policy_of({MODE: value, OWN: "lc"})
    assert (policy.userspace, policy.scheduler) == (False, "lc")
    assert f"metadata.annotations[{MODE}]" in line and "is not userspace; the node's mode is used" in line
