# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rollback is refused where it would replace the rules of another service proxy, or leave the node without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import PreflightError
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight import processes
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import restore
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.state import NodeState
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.store import History


@pytest.mark.parametrize(
    ("standalone", "written", "reason"),
    [
        (False, "CONFIGURATION_FILE", "leaves this node's Services to another program, whose rules would be lost"),
        (True, "KEPT_OFF_FILE", "with networkPolicy.standalone nothing else"),
    ],
)
def test_a_rollback_leaves_each_node_its_service_proxy(
    standalone: bool, written: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CONFIGURATION_FILE", "KEPT_OFF_FILE"):
        monkeypatch.setattr(processes, name, str(tmp_path / name))
    (tmp_path / written).write_text("networkPolicy: {enabled: true, standalone: true}", encoding="utf-8")
    monkeypatch.setattr(restore, "rights_findings", lambda _capabilities: [])
    directory = tmp_path / "history"
    History(str(directory), 5).save(NodeState(policies_standalone=standalone))
    with pytest.raises(PreflightError, match=reason):
        restore.rollback(restore.RollbackRequest(history_directory=str(directory), check=True))
