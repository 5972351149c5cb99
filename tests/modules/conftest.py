# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A fresh node for each test; see harness.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator

import pytest

from tests.modules.harness import Node


def pytest_sessionstart() -> None:
    """Fail at once without root instead of in every test."""
    if os.geteuid() != 0:
        pytest.exit("module tests need root for a separate namespace: run them with sudo", returncode=2)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Provide a fresh node."""
    made = Node(tmp_path)
    try:
        yield made
    finally:
        made.close()
