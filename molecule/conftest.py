# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fixtures for the checks of all scenarios."""

from __future__ import annotations

import os

import pytest

from tests.molecule_support.checks import Node
from tests.molecule_support.scenario import Scenario

SCENARIO = Scenario(os.environ["MOLECULE_SCENARIO_NAME"])
NODES = {node.name: Node(SCENARIO, node) for node in SCENARIO.nodes}


@pytest.fixture(params=list(NODES))
def node(request):
    """Provide each node in turn."""
    return NODES[request.param]


@pytest.fixture
def nodes():
    """Provide all nodes, by name."""
    return NODES


@pytest.fixture
def scenario():
    """Provide the network and the cluster of the nodes."""
    return SCENARIO
