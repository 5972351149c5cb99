# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rollback on a real kernel: the state before, of any program, is restored, verified with the usual tools.

The nodes start with rules of other programs only, with what kube-proxy programmed for a conformance case, or with what
this project programmed; they converge to the same or another mode, and roll back.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import (
    HistoryError,
    KernelError,
    PreflightError,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.saved import CHAIN, SavedChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.running import pack_running
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import revert
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.store import (
    BEFORE_CONVERGENCE,
    BEFORE_ROLLBACK,
    History,
)
from tests.kernel.rollback_node import POLICIES_OFF, POLICIES_ON, Node, differences, dump, names, policies
from tests.lab.system import run

UML = pytest.mark.uml
UML_FULL = (pytest.mark.uml, pytest.mark.full)

# The initial state (none: nothing of a service proxy), the iptables variant in use, and the modes it converges to.
JOURNEYS = [
    ("none", "nft", ["nftables"]),
    ("none", "nft", ["iptables"]),
    ("none", "nft", ["iptables", "nftables"]),
    ("none", "legacy", ["iptables", "nftables"]),
    ("iptables", "nft", ["iptables"]),
    ("iptables", "nft", ["nftables"]),
    ("iptables", "legacy", ["nftables"]),
    ("iptables", "legacy", ["nftables", "iptables"]),
    ("nftables", "nft", ["nftables"]),
    ("nftables", "nft", ["iptables"]),
    ("nftables", "legacy", ["iptables"]),
    ("nftables-1.38", "nft", ["nftables"]),
    ("nftables-1.38", "nft", ["iptables", "nftables"]),
    pytest.param("none", "legacy", ["ipvs"], marks=UML_FULL),
    pytest.param("none", "legacy", ["iptables", "ipvs"], marks=UML_FULL),
    pytest.param("iptables", "legacy", ["ipvs"], marks=UML_FULL),
    pytest.param("ipvs", "legacy", ["ipvs"], marks=UML_FULL),
    pytest.param("ipvs", "legacy", ["iptables"], marks=UML),
]
LATER = "*filter\n-A INPUT -p tcp -m tcp --dport 6 -j DROP\nCOMMIT\n"


@pytest.fixture
def node(tmp_path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("start", "variant", "modes"), JOURNEYS, ids=lambda item: item if isinstance(item, str) else "-".join(item)
)
def test_a_rollback_restores_everything_and_a_second_one_undoes_it(node, start, variant, modes) -> None:
    node.load(start, variant)
    before = dump()
    for number, mode in enumerate(modes, 1):
        assert node.converge(mode).saved_state == number
        again = node.converge(mode)
        assert (again.changed, again.saved_state) == (False, None)
    between = dump()
    assert between != before

    preview = node.roll_back(1, check=True, describe=True)
    assert preview.changed and preview.saved is None
    assert differences(between, dump()) == ""
    assert all(change.before or change.after for change in preview.changes)

    report = node.roll_back(1)
    assert differences(before, dump()) == ""
    assert names(report.changes) == names(preview.changes)
    assert report.saved == len(modes) + 1
    second = node.roll_back(1)
    assert (second.changed, second.saved) == (False, None)

    node.roll_back(report.saved)
    assert differences(between, dump()) == ""


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_external_changes_made_in_between_are_kept(node, variant) -> None:
    node.load("iptables", variant)
    node.converge("nftables")
    run([f"iptables-{variant}-restore", "--noflush"], stdin=LATER)
    run(["nft", "add table inet later { chain kept { tcp dport 7 drop; }; }"])
    jumps = [
        line for line in run([f"iptables-{variant}-save"]).splitlines() if "PREROUTING" in line and "OTHER" in line
    ]
    node.roll_back()
    saved = run([f"iptables-{variant}-save"])
    assert "-A INPUT -p tcp -m tcp --dport 6 -j DROP" in saved
    assert "tcp dport 7 drop" in run(["nft", "list", "table", "inet", "later"])
    rules = [line for line in saved.splitlines() if line.startswith("-A PREROUTING")]
    # kube-proxy's jump was behind the rule of another program, and is restored behind it.
    assert rules[0] == jumps[0] and "KUBE-SERVICES" in rules[1]


def test_a_chain_that_external_rules_now_use_is_kept(node) -> None:
    node.load("none", "nft")
    node.converge("iptables")
    run(["iptables-nft", "-t", "nat", "-A", "OTHER", "-j", "KUBE-MARK-MASQ"])
    node.roll_back()
    chains = re.findall(r"^:(KUBE-\S+)", run(["iptables-nft-save"]), re.MULTILINE)
    assert chains == ["KUBE-MARK-MASQ"]
    assert node.roll_back().changed is False


def test_the_newest_saved_state_is_the_default(node) -> None:
    node.load("none", "nft")
    empty = dump()
    node.converge("iptables")
    iptables = dump()
    node.converge("nftables")
    assert node.roll_back().record.number == 2
    assert differences(iptables, dump()) == ""
    assert node.roll_back().changed is False
    node.roll_back(1)
    assert differences(empty, dump()) == ""
    reasons = [item.reason for item in History(node.history).list()]
    assert reasons == [BEFORE_ROLLBACK, BEFORE_ROLLBACK, BEFORE_CONVERGENCE, BEFORE_CONVERGENCE]


def test_only_the_last_states_are_kept_and_check_mode_saves_none(node) -> None:
    node.load("none", "nft")
    for mode in ("iptables", "nftables", "iptables", "nftables"):
        node.converge(mode, check=True, keep_states=2)
        node.converge(mode, keep_states=2)
    assert History(node.history).numbers() == [3, 4]
    with pytest.raises(HistoryError, match=r"state 1: there is no such saved state in .* \(there are: 3, 4\)"):
        node.roll_back(1)
    assert sorted(path.stat().st_mode & 0o777 for path in Path(node.history).iterdir()) == [0o600, 0o600]
    assert Path(node.history).stat().st_mode & 0o777 == 0o700


def nat(dumped: dict[str, Any]) -> list[str]:
    return [table for table in dumped["iptables-nft-save"] if table.startswith("*nat")]


def test_a_refused_table_is_unchanged_and_the_state_can_be_rolled_back(node) -> None:
    node.load("none", "nft")
    node.converge("iptables")
    history = History(node.history)
    state = history.load(1).state
    item = next(item for item in state.chains if (item.variant, item.family) == ("nft", "IPv4"))
    wrong = {**item.chains, SavedChainKey(CHAIN, "nat", "KUBE-SERVICES"): ("-j NOWHERE-AT-ALL",)}
    number = history.save(state._replace(chains=(item._replace(chains=wrong),))).number
    between = dump()
    with pytest.raises(KernelError, match="NOWHERE-AT-ALL"):
        node.roll_back(number)
    assert nat(dump()) == nat(between) != []
    node.roll_back(number + 1)
    assert differences(between, dump()) == ""


@pytest.mark.parametrize("change", ["of the mode", "to network policies", "to none"])
def test_the_timers_program_rolls_back_on_its_own(node, tmp_path, change) -> None:
    """It is a single file that needs only Python."""
    node.load("iptables", "nft")
    if change == "to none":
        node.converge("nftables", history_directory="", **policies(POLICIES_ON, "ip-block"))
    before = dump()
    settings = {"of the mode": None, "to network policies": POLICIES_ON, "to none": POLICIES_OFF}[change]
    node.converge("nftables", **(policies(settings, "ip-block") if settings else {}))
    program = tmp_path / "revert.pyz"
    program.write_bytes(pack_running(revert.__name__))
    waits = tmp_path / "waits"
    waits.mkdir(mode=0o700)
    directory = str(tmp_path / "run")
    document = {"saved_state": 1, "armed": 0, "timeout": 1, "deadline": "", "state_directory": directory}
    (waits / "pending.json").write_text(json.dumps({**document, "history_directory": node.history}))
    options = ["--to", "1", "--history", node.history, "--state-directory", directory, "--pending", str(waits)]
    command = [sys.executable, "-I", "-S", "-B", str(program), *options]
    between = dump()
    assert "kubenode-proxy: state 1:" in run([*command, "--check"])
    assert differences(between, dump()) == ""
    assert "not confirmed and is reverted: state 1:" in run(command)
    assert differences(before, dump()) == ""
    assert not waits.exists()
    assert "no change waits" in run(command)
    assert History(node.history).outcome(1) == "reverted"


def test_a_change_to_be_confirmed_is_refused_without_systemd_before_any_change(node) -> None:
    node.load("iptables", "nft")
    before = dump()
    with pytest.raises(PreflightError, match=r"confirm_timeout: .*; set it to 0 to need no confirmation"):
        node.converge("nftables", confirm_timeout=60.0)
    assert differences(before, dump()) == ""
    assert not Path(node.history).exists()
