# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes of user-declared chains that fail halfway, or that cannot be reverted at once."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import time
from pathlib import Path
from typing import Callable

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import HistoryError, KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.generic import chain_changes, provisional
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.chain_changes import (
    ChainChange,
    apply_changes,
    refuse_unconfirmed,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.iptables_chains import ListedChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.listed_chains import FIRST, Jump, ListedChain
from ansible_collections.kubenode.proxy.plugins.module_utils.generic.provisional import arm, confirm
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.lab.system import run

VARIANTS = pytest.mark.parametrize("variant", ["legacy", "nft"])
PATIENCE = 120.0


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a lock file that no program of the host uses."""
    path = tmp_path / "xtables.lock"
    monkeypatch.setenv("XTABLES_LOCKFILE", str(path))
    return path


def rules(variant: str) -> list[str]:
    found = run([f"iptables-{variant}-save"]) + run([f"ip6tables-{variant}-save"])
    # Tables that a failed change has created are empty.
    return [line for line in found.splitlines() if line.startswith("-A")]


def chains_of(table: str, *declared: str) -> list[ListedChain]:
    """Return a chain OLD with a jump at the head of FORWARD or PREROUTING."""
    hook = "PREROUTING" if table == "mangle" else "FORWARD"
    return [ListedChain(table, "OLD", declared or ("-j RETURN",), (Jump(hook, "-i lo", FIRST),))]


def staged(variant: str, family: str, chains: list[ListedChain], removal: bool = False) -> ChainChange:
    resource = ListedChainsResource(detect_variant(family, variant), chains, removal=removal)
    return ChainChange(resource, difference(*resource.stage()))


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def waiting_for(directory: Path) -> list[str]:
    """Return the processes that wait to revert a change below a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(directory) in path.read_text():
                found.append(path.parent.name)
    return found


def removal_that_fails(variant: str) -> tuple[list[str], list[ChainChange]]:
    """Return the rules, and a change of both families whose last table can no longer be changed.

    Another program has added a rule that jumps to a chain after the change was planned.
    """
    chains = [*chains_of("filter"), *chains_of("mangle")]
    for family, program in (("IPv4", f"iptables-{variant}"), ("IPv6", f"ip6tables-{variant}")):
        run([program, "-A", "FORWARD", "-p", "udp", "-j", "ACCEPT"])
        change = staged(variant, family, chains)
        change.resource.apply(change.change)
        run([program, "-I", "FORWARD", "2", "-p", "tcp", "-j", "ACCEPT"])
        run([program, "-A", "FORWARD", "-i", "lo", "-j", "OLD"])
    changes = [staged(variant, family, chains, removal=True) for family in ("IPv4", "IPv6")]
    run([f"ip6tables-{variant}", "-t", "filter", "-A", "OUTPUT", "-j", "OLD"])
    return rules(variant), changes


@VARIANTS
@pytest.mark.parametrize("seconds", [0, 300])
def test_a_change_that_fails_in_its_last_table_is_reverted(variant: str, seconds: int, tmp_path: Path) -> None:
    before, changes = removal_that_fails(variant)
    with pytest.raises(KernelError, match=r"the changes made before were rolled back: IPv6, IPv4") as failure:
        apply_changes(changes, seconds, str(tmp_path / "changes"))
    assert "\n" not in str(failure.value)
    assert rules(variant) == before
    assert not confirm("", directory=str(tmp_path / "changes"))
    for place in tmp_path.glob("changes/*"):
        # The timer's program finds nothing to do.
        run(["sh", str(place / "revert")])
        with pytest.raises(HistoryError, match="has failed: there is nothing to confirm"):
            confirm(place.name, directory=str(tmp_path / "changes"))
    assert len(list(tmp_path.glob("changes/*"))) == (1 if seconds else 0)
    assert rules(variant) == before
    # No pending change keeps the next one from being applied.
    again = staged(variant, "IPv4", chains_of("filter", "-p udp -j RETURN"))
    change = apply_changes([again], 300, str(tmp_path / "changes"))
    assert waiting_for(tmp_path)
    assert confirm(change, directory=str(tmp_path / "changes"))
    wait(lambda: not waiting_for(tmp_path))


@VARIANTS
def test_a_change_that_applies_nothing_leaves_no_revert(variant: str, tmp_path: Path) -> None:
    _rules, changes = removal_that_fails(variant)
    run([f"ip6tables-{variant}", "-t", "mangle", "-A", "OUTPUT", "-j", "OLD"])
    before = rules(variant)
    with pytest.raises(KernelError) as failure:
        apply_changes(changes[1:], 300, str(tmp_path / "changes"))
    assert "rolled back" not in str(failure.value)
    assert rules(variant) == before
    assert not confirm("", directory=str(tmp_path / "changes"))


@pytest.mark.parametrize("seconds", [0, 300])
def test_chains_are_not_changed_while_a_change_of_their_table_waits(seconds: int, tmp_path: Path) -> None:
    directory = str(tmp_path / "changes")
    name = apply_changes([staged("nft", "IPv4", chains_of("filter"))], 300, directory)
    before = rules("nft")
    waiting = rf"^change {name} still waits to be confirmed \(state: confirmed\)$"
    same = staged("nft", "IPv4", chains_of("filter", "-j DROP"))
    removal = staged("nft", "IPv4", chains_of("filter"), removal=True)
    user = staged("nft", "IPv4", [ListedChain("filter", "NEW", ("-j OLD",))])
    for later in (same, removal, user):
        with pytest.raises(HistoryError, match=waiting):
            refuse_unconfirmed([later], seconds, directory)
        with pytest.raises(HistoryError, match=waiting):
            apply_changes([later], seconds, directory)
    assert rules("nft") == before
    elsewhere = [staged("nft", "IPv4", chains_of("mangle")), staged("nft", "IPv6", chains_of("filter"))]
    if seconds:
        # Only one change can wait at a time.
        with pytest.raises(HistoryError, match=waiting):
            refuse_unconfirmed(elsewhere, seconds, directory)
    else:
        refuse_unconfirmed(elsewhere, seconds, directory)
        apply_changes(elsewhere, seconds, directory)
    refuse_unconfirmed([staged("nft", "IPv4", chains_of("filter"))], seconds, directory)
    assert confirm(name, directory=directory)
    apply_changes([same], 0, directory)
    assert "-A OLD -j DROP" in rules("nft")


@pytest.mark.parametrize("broken", ["start", "write"])
def test_a_change_that_cannot_be_armed_is_not_found_pending(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> str:
        raise HistoryError("the timer cannot be created")

    before = rules("nft")
    change = staged("nft", "IPv4", chains_of("filter"))
    with monkeypatch.context() as patched, pytest.raises(HistoryError, match="the timer cannot be created"):
        patched.setattr(provisional, "_start" if broken == "start" else "_script", refuse)
        apply_changes([change], 300, str(tmp_path / "changes"))
    assert rules("nft") == before
    assert list(tmp_path.glob("changes/*")) == []
    assert not confirm("", directory=str(tmp_path / "changes"))
    name = apply_changes([change], 300, str(tmp_path / "changes"))
    assert confirm(name, directory=str(tmp_path / "changes"))


def test_a_change_not_reverted_at_once_is_reverted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, changes = removal_that_fails("nft")

    def refuse(*_arguments: object, **_options: object) -> int:
        raise KernelError("no memory")

    monkeypatch.setattr(chain_changes, "restore", refuse)
    with pytest.raises(KernelError, match="could not be rolled back: no memory; the node tries again in 300 seconds"):
        apply_changes(changes, 300, str(tmp_path / "changes"))
    assert rules("nft") != before
    (script,) = tmp_path.glob("changes/*/revert")
    run(["sh", str(script)])
    assert rules("nft") == before
    with pytest.raises(HistoryError, match="the node has rolled it back"):
        confirm(script.parent.name, directory=str(tmp_path / "changes"))


def test_a_revert_waits_for_the_xtables_lock(tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provisional, "_LOCK_SECONDS", 1)
    before = rules("legacy")
    name = apply_changes([staged("legacy", "IPv4", chains_of("filter"))], 300, str(tmp_path / "changes"))
    place = tmp_path / "changes" / name
    with lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(["sh", str(place / "revert")], stderr=subprocess.DEVNULL) as revert:
            wait(lambda: (place / "output").exists() and "xtables lock" in (place / "output").read_text())
            fcntl.flock(held, fcntl.LOCK_UN)
            assert revert.wait(PATIENCE) == 0
    assert rules("legacy") == before
    assert (place / "reverted").exists()


def test_a_revert_in_progress_is_left_to_end(tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provisional, "_LOCK_SECONDS", 1)
    monkeypatch.setattr(provisional, "_ATTEMPTS", 8)
    directory = str(tmp_path / "changes")
    before = rules("legacy")
    changes = [staged("legacy", family, chains_of("filter")) for family in ("IPv4", "IPv6")]
    later = [staged("legacy", "IPv4", chains_of("filter", "-j DROP"))]
    name = apply_changes(changes, 300, directory)
    place = tmp_path / "changes" / name
    with lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(["sh", str(place / "revert")], stderr=subprocess.DEVNULL) as revert:
            wait(lambda: (place / "output").exists() and "xtables lock" in (place / "output").read_text())
            for seconds in (0, 300):
                with pytest.raises(HistoryError, match=f"^change {name} is being rolled back: try again when that has"):
                    refuse_unconfirmed(later, seconds, directory)
            with pytest.raises(HistoryError, match=f"^change {name} is being rolled back"):
                arm([], 300, directory)
            with pytest.raises(HistoryError, match=f"^change {name} was not confirmed in time: it is being rolled"):
                confirm(name, directory=directory)
            assert not confirm("", directory=directory)
            # Changes of other tables need not wait, unless they are provisional themselves.
            refuse_unconfirmed([staged("legacy", "IPv4", chains_of("mangle"))], 0, directory)
            fcntl.flock(held, fcntl.LOCK_UN)
            assert revert.wait(PATIENCE) == 0
    assert rules("legacy") == before
    with pytest.raises(HistoryError, match="the node has rolled it back"):
        confirm(name, directory=directory)
    assert apply_changes(later, 0, directory) == ""


def test_an_interrupted_revert_does_not_refuse_later_changes(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provisional, "_LOCK_SECONDS", 1)
    monkeypatch.setattr(provisional, "_ATTEMPTS", 8)
    directory = str(tmp_path / "changes")
    name = apply_changes([staged("legacy", "IPv4", chains_of("filter"))], 300, directory)
    place = tmp_path / "changes" / name
    with lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(["sh", str(place / "revert")], stderr=subprocess.DEVNULL) as revert:
            wait((place / "output").exists)
            revert.kill()
    assert (place / "reverting").exists()
    # A second process, which has waited for the timeout, finds nothing to do, and is not taken for the first.
    run(["sh", str(place / "revert")])
    with pytest.raises(HistoryError, match=f"^change {name} was not confirmed in time, and its rollback was interrupt"):
        confirm(name, directory=directory)
    again = apply_changes([staged("legacy", "IPv4", chains_of("filter", "-j DROP"))], 300, directory)
    assert confirm(again, directory=directory)
    assert not place.exists()


def test_a_revert_that_the_kernel_refuses_is_reported(tmp_path: Path) -> None:
    name = apply_changes([staged("legacy", "IPv4", chains_of("filter"))], 300, str(tmp_path / "changes"))
    run(["iptables-legacy", "-A", "OUTPUT", "-j", "OLD"])
    before = rules("legacy")
    run(["sh", str(tmp_path / "changes" / name / "revert")])
    assert rules("legacy") == before
    with pytest.raises(HistoryError, match=r"was not confirmed in time, and could not be rolled back: \S+"):
        confirm(name, directory=str(tmp_path / "changes"))
