# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Only the entry points of the role service_proxy that change a host have a variable for the lock."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.documentation import collection

(ROLE,) = (role for role in collection.roles() if role.name == "service_proxy")


@pytest.mark.parametrize("entry_point", ["inspect", "preview", "verify"])
def test_a_comparison_waits_for_no_lock(entry_point: str) -> None:
    assert "service_proxy_lock_timeout" not in ROLE.entry_points[entry_point]["options"]
    tasks = (ROLE.directory / "tasks" / f"{entry_point}.yml").read_text(encoding="utf-8")
    assert "lock_timeout" not in tasks


def test_a_convergence_waits_for_the_lock() -> None:
    assert "service_proxy_lock_timeout" in ROLE.entry_points["main"]["options"]
    assert "lock_timeout" in (ROOT / "roles/service_proxy/tasks/present.yml").read_text(encoding="utf-8")
