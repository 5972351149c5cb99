# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Containers for the tests of a module, and the cluster of the container ``node``."""

from __future__ import annotations

import os
from typing import Sequence

import pytest

from .cluster import Cluster
from .node import Node, remove_left_over


@pytest.fixture(scope="session", autouse=True)
def _only_live_runs():
    remove_left_over()


@pytest.fixture(scope="module")
def start(tmp_path_factory, request):
    """Provide a function that starts a container by a short name; all are removed after the module's tests.

    The container names include this process's ID, so that several runs on one machine do not conflict.
    """
    started = []

    def begin(
        name: str,
        network: str = "podman",
        release: str = "12",
        *,
        project: bool = False,
        packages: Sequence[str] = (),
    ) -> Node:
        scratch = tmp_path_factory.mktemp(name)
        node = Node(f"knp{os.getpid()}-{name}", scratch, network, release, project=project, packages=packages)
        started.append(node)
        return node

    yield begin
    for node in started:
        node.close()


@pytest.fixture(scope="module")
def cluster(node):
    """Provide the cluster of the module's node, on a real API server if the environment names one."""
    module_cluster = Cluster(node.scratch, [node.name], real=True)
    yield module_cluster
    module_cluster.close()


@pytest.fixture(scope="module")
def variables(cluster):
    """Provide variables of the role agent, which tests of a module may change."""
    return {
        "agent_kubeconfig": str(cluster.kubeconfig),
        "agent_configuration": {"mode": "iptables"},
    }
