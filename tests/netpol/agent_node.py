# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node under test, kept in sync by the agent's runner and a test API server in its network namespace."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import packed
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import NetworkPolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.policy import find_links
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.policy_table import PolicyTableResource
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.elements import desired_table
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.sets import Options
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig

from .random_clusters import NODE_ADDRESSES
from .running import RUNNERS, Node

_SECONDS = 60.0


class AgentNode(Node):
    """A node whose agent follows the objects of a store."""

    def __init__(self, node: Node, store: Store) -> None:
        self.__dict__.update(node.__dict__)
        self._store = store

    def converge(self, objects: Iterable[dict[str, Any]], **_environment: str) -> str:
        """Give the API server these objects, and wait until the table in the kernel is the one of them."""
        found = list(objects)
        self._store.replace_all(found)
        cluster = ClusterState.from_objects(found)
        own = [raw for raw in map(packed, NODE_ADDRESSES) if raw is not None]
        policy = NodePolicy("node1", cluster.policy, own, cluster_policies=True)
        with self.network.namespaces["node1"].inside():
            find_links(policy, NetworkPolicySettings())
        desired = desired_table(policy.table.rows, Options(tiers=True))
        deadline = time.monotonic() + _SECONDS
        while True:
            with self.network.namespaces["node1"].inside(), PolicyTableResource() as table:
                change = difference(table.observe(), desired)
            if not change:
                return ""
            assert time.monotonic() < deadline, f"the agent did not converge: {change}"
            time.sleep(0.05)


@contextlib.contextmanager
def agent_in(node: Node) -> Iterator[AgentNode]:
    """Run the agent in a node."""
    scratch, store = node.directory, Store()
    certificates = make_certificates(scratch / "tls")
    listener = node.network.namespaces["node1"].socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(True)
    server = ApiServer(store, certificates, listener=listener)
    kubeconfig = write_kubeconfig(scratch / "kubeconfig", server.url, certificates.authority, server.token)
    with open(scratch / "agent.log", "wb") as log:
        agent = subprocess.Popen(
            ["ip", "netns", "exec", node.network.full_name("node1"), str(RUNNERS / "agent")],
            env={**node.environment, "LAB_KUBECONFIG": str(kubeconfig)},
            stderr=log,
        )
    try:
        yield AgentNode(node, store)
    finally:
        agent.terminate()
        agent.wait(30)
        server.close()
