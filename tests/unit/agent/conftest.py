# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fixtures of the tests of the agent's network policies."""

from __future__ import annotations

import pytest

from tests.unit.agent.policy_bench import Kernel, table_in_memory


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Provide the table in memory that the agent watches."""
    return table_in_memory(monkeypatch)
