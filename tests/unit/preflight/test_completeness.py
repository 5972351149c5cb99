# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A cluster state without Pods or Namespaces would end all isolation, so it is refused if policies are enforced."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.cluster_state import completeness_findings

SERVICES = {"Service", "EndpointSlice", "Node"}


@pytest.mark.parametrize(
    ("kinds", "policies", "missing"),
    [
        (SERVICES, False, ""),
        (SERVICES, True, "no Pod and no Namespace"),
        ({*SERVICES, "Pod"}, True, "no Namespace"),
        ({*SERVICES, "Pod", "Namespace"}, True, ""),
    ],
)
def test_pods_and_namespaces_are_needed_for_policies(kinds, policies, missing):
    found = completeness_findings(kinds, policies=policies)
    assert [missing in str(finding) and "pods,namespaces" in str(finding) for finding in found] == [True] * bool(
        missing
    )


@pytest.mark.parametrize(
    ("kinds", "missing"), [({"Node", "Pod", "Namespace"}, []), ({"Node", "Pod"}, ["no Namespace"])]
)
def test_services_are_not_needed_where_another_program_serves_them(kinds, missing):
    found = completeness_findings(kinds, policies=True, services=False)
    assert (
        [text in str(finding) for finding, text in zip(found, missing)] == [True] * len(found) == [True] * len(missing)
    )
