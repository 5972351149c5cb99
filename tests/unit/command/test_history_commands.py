# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the parts of the commands ``rollback`` and ``confirm`` that need no kernel: output and errors."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.command import confirm_command, rollback_command
from ansible_collections.kubenode.proxy.plugins.module_utils.command.cli import Streams, main
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import TableChange
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.saved import CHAIN, SavedChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.confirm import ConfirmReport
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.form import StateRecord
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.restore import RollbackReport
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.state import ChainsState, NodeState
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.store import History

CHAINS = ChainsState("IPv4", "nft", (), {SavedChainKey(CHAIN, "nat", "KUBE-SERVICES"): ()})


def run(*arguments: str) -> tuple[int, str, str]:
    streams = Streams(io.StringIO(), io.StringIO())
    status = main(list(arguments), streams)
    return status, streams.output.getvalue(), streams.errors.getvalue()


@pytest.fixture
def directory(tmp_path) -> str:
    return str(tmp_path / "history")


def test_saved_states_are_listed_newest_first(directory):
    history = History(directory)
    history.save(NodeState())
    history.save(NodeState(chains=(CHAINS,)))
    history.note(2, "confirmed")
    (Path(directory) / "state-000003.json.gz").write_bytes(b"x")
    status, output, _errors = run("rollback", "--list", "--history", directory)
    lines = output.splitlines()
    assert status == 0 and len(lines) == 3
    assert lines[0].startswith("     3  cannot be used: ") and "truncated" in lines[0]
    assert lines[1].endswith("before a convergence  iptables: 1 chains; the change after it was confirmed")
    assert lines[2].endswith("before a convergence  nothing programmed")
    document = json.loads(run("rollback", "--list", "--output", "json", "--history", directory)[1])
    assert [item["number"] for item in document["states"]] == [3, 2, 1]


def test_a_missing_saved_state_is_reported(directory):
    assert run("rollback", "--list", "--history", directory)[1] == f"no saved states in {directory}\n"


@pytest.mark.parametrize(
    ("check", "status", "last"),
    [
        (True, 3, "would stop kubenode-proxy.service: systemctl start kubenode-proxy.service undoes the rollback"),
        (False, 0, "rolled back to state 4; saved the previous state as 5"),
    ],
)
def test_the_result_of_a_rollback_is_printed(monkeypatch, check, status, last):
    record = StateRecord(number=4, created="", reason="", kernel="", engine="", boot="", state=NodeState())
    change = TableChange(table="IPv4 chains (nft)", added=1, replaced=2, removed=3, before=("-old",), after=("+new",))
    report = RollbackReport(
        record=record,
        changed=True,
        changes=(change,),
        saved=None if check else 5,
        stopped=("kubenode-proxy.service",),
        warnings=("careful",),
        durations={},
    )
    monkeypatch.setattr(rollback_command, "rollback", lambda request: report)
    found, output, errors = run("rollback", *(["--check"] if check else []))
    assert found == status and output.splitlines()[-1] == last
    words = "1 to add, 2 to replace, 3 to remove" if check else "1 added, 2 replaced, 3 removed"
    assert output.splitlines()[0] == f"IPv4 chains (nft): {words}"
    assert errors == "kubenode-proxy: warning: careful\n"
    assert "+new" not in output and "++new" in run("rollback", "--diff")[1]


def test_a_change_is_confirmed_only_after_its_probes(monkeypatch, directory):
    asked = []

    def confirm(state, history_directory):
        asked.append(state)
        return ConfirmReport(7, True, 31.5)

    monkeypatch.setattr(confirm_command, "confirm", confirm)
    # No program listens on port 1 of this machine.
    status, _output, errors = run("confirm", "--probe", "tcp://127.0.0.1:1", "--probe-timeout", "0.2")
    assert (status, asked) == (1, [])
    assert (
        errors == "kubenode-proxy: not confirmed because probes failed: tcp://127.0.0.1:1: the connection was refused\n"
    )
    status, output, _errors = run("confirm", "--state", "7", "--history", directory)
    assert (status, asked) == (0, [7])
    assert output == "the change after state 7 is kept; 31.5 seconds were left\n"
    assert run("confirm", "--probe", "nonsense")[0] == 1
