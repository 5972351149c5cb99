# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests of network policies on the wire run as root, in network namespaces only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .network import Network
from .running import Node

Lab = Callable[..., tuple[Network, Node]]


def pytest_sessionstart() -> None:
    """Fail at once with the missing requirements instead of in every test."""
    if os.geteuid() != 0:
        pytest.exit("tests of network policies need root: run them with sudo", returncode=2)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Return a function that makes the network and the node under test, for a mode."""
    opened: list[Network] = []

    def made(mode: str, bridge: bool = False) -> tuple[Network, Node]:
        network = Network(f"c{os.getpid()}", bridge)
        opened.append(network)
        network.__enter__()
        return network, Node(network, tmp_path, mode)

    yield made
    for network in opened:
        network.destroy()
