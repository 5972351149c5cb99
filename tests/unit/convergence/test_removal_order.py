# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A clean-up removes virtual servers before what masquerades and filters the connections to them."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import KubeProxyConfiguration
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence import converge
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.guard import Guard
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.handles import KernelHandles
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request


@pytest.mark.parametrize(("check", "plans"), [(False, ["servers", "everything"]), (True, ["everything"])])
def test_virtual_servers_are_removed_first(check: bool, plans: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A check plans everything at once, since nothing is gone in between."""
    ran: list[Any] = []
    results: dict[str, Any] = {"check_removal": [], "removal_contexts": []}
    results |= {"removal.server_removal_stages": "servers", "removal.removal_stages": "everything"}
    for name, result in results.items():
        monkeypatch.setattr(f"{converge.__name__}.{name}", lambda *_arguments, result=result: result)
    monkeypatch.setattr(converge._Convergence, "_run", lambda _self, stages, *_more: ran.append(stages))
    request = Request(ClusterState.from_objects([]), KubeProxyConfiguration(), state="absent", check=check)
    with KernelHandles() as handles:
        converge._Convergence(request, handles, Guard(request, handles)).remove()
    assert ran == plans
