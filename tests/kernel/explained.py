# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Explanations of the flows to all addresses of a cluster's Services, on the node that the test has programmed."""

from __future__ import annotations

from typing import Any, Iterator

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.validate import in_mode
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyTables
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.handles import KernelHandles
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import choose_mode
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.node import view_node
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.explain import explained_families
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.flows import FlowExplainer, Kernel
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.target import Destination

CLIENTS = {False: "192.0.2.77", True: "2001:db8::77"}


def destinations(state: ClusterState) -> Iterator[Destination]:
    """Yield all addresses and ports of Services, except node ports."""
    for service in state.services.values():
        addresses = (service.cluster_ip_v4, service.cluster_ip_v6, *service.external_ips, *service.load_balancer_ips)
        for port in service.ports:
            for address in filter(None, addresses):
                yield Destination(address, port.port, port.protocol.lower())


def explain_everything(request: Request) -> dict[str, dict[str, Any]]:
    """Return the explanation of a flow from outside to each destination, by the text of that."""
    mode = choose_mode(request._replace(check=True)).mode
    configuration = in_mode(request.configuration, mode.name)
    view = view_node(request, configuration, mode)
    families = explained_families(request.cluster, configuration, view, mode)
    with KernelHandles(loads=False) as handles:

        def stages(family: Any) -> Any:
            tables = FamilyTables(family.context, family.tables.desired)
            return mode.stages(configuration, [tables], handles)

        explainer = FlowExplainer(request.cluster, families, mode, Kernel(handles, stages))
        found = {
            str(item): explainer.document(CLIENTS[":" in item.address], 0, item)
            for item in destinations(request.cluster)
        }
        assert explainer.problems == []
    return found
