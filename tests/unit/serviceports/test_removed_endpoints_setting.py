# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the values that say what becomes of connections to removed endpoints."""

from __future__ import annotations

import math

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.policy import policy_of, reset_after
from tests.lab import manifests

ANNOTATION = "kubenode.proxy/removed-endpoints"
HOSTILE = [
    "",
    "Reset",
    "reset-after",
    "reset-after=",
    "reset-after=30",
    "reset-after=0s",
    "reset-after=999ms",
    "reset-after=61m",
    "reset-after=-1s",
    "reset-after=inf",
    "reset-after=1s\nx",
    "reset-after=\u0661s",
    "reset-after=" + "9" * 5000 + "s",
    None,
    7,
    ["reset"],
    {"reset": True},
]
"""Values that are refused."""


def annotated(value):
    service = manifests.service("web", "10.96.0.1", [manifests.port(80)])
    service["metadata"]["annotations"] = {ANNOTATION: value}
    return ClusterState.from_objects([service])


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("keep", math.inf), ("reset", 0.0), (" reset ", 0.0), ("reset-after=30s", 30.0), ("reset-after=60m", 3600.0)],
)
def test_values_of_the_annotation(value, seconds):
    state = annotated(value)
    (service,) = state.services.values()
    settings = load({}).configuration.node_proxy.service_policy
    assert not state.skipped and reset_after(policy_of(service, settings), settings) == seconds
    # Where annotations do not count, the default does.
    settings = settings._replace(annotations_enabled=False, removed_endpoints=7.0)
    assert reset_after(policy_of(service, settings), settings) == 7.0


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_is_refused_in_one_short_line_and_the_default_holds(value):
    state = annotated(value)
    (service,) = state.services.values()
    assert service.policy.reset_after is None
    (line,) = map(str, state.skipped)
    assert ANNOTATION in line and "is not keep, reset or reset-after=DURATION, from 1s to 60m" in line
    assert len(line) < 400 and line.isprintable()
