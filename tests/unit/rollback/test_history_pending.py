# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test pending changes: only the first decision counts, and each outcome has its own error message."""

from __future__ import annotations

import calendar
import errno
import functools
import os
import re
import time

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import (
    HistoryError,
    KernelError,
    PreflightError,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.base.timestamps import TIMESTAMP
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.programs import Completed
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging import running
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import (
    confirm,
    decisions,
    directory,
    guard,
    pending,
    restore,
    revert,
    store,
    units,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.state import NodeState


@pytest.fixture
def history(tmp_path) -> store.History:
    states = store.History(str(tmp_path / "history"))
    states.save(NodeState())
    return states


@pytest.fixture
def place(tmp_path, monkeypatch) -> str:
    """Set the default directory of pending changes and return it."""
    directory = str(tmp_path / "waits")
    for name in ("read", "claim", "clear"):
        monkeypatch.setattr(getattr(pending, name), "__defaults__", (directory,))
    monkeypatch.setattr(pending, "DIRECTORY", directory)
    return directory


@pytest.fixture
def waiting(history, place) -> pending.Pending:
    change = pending.Pending(
        saved_state=1,
        armed=time.monotonic(),
        timeout=600.0,
        deadline="2030-01-02T03:04:05Z",
        history_directory=history.directory,
        state_directory="/run/x",
    )
    assert pending.write(change, b"engine", place) == f"{place}/revert.pyz"
    return change


def test_a_pending_change_is_stored_and_readable_only_for_root(waiting, place):
    assert pending.read() == waiting
    assert os.stat(place).st_mode & 0o777 == 0o700
    assert 0 < waiting.remaining <= 600
    text, _space, until = str(waiting).rpartition(" ")
    assert text == "the change after state 1 waits to be confirmed until"
    assert 500 < calendar.timegm(time.strptime(until, TIMESTAMP)) - time.time() <= 600


def test_confirming_ends_the_pending_change_and_is_idempotent(waiting, place, history):
    assert confirm.confirm(1, check=True, history_directory=history.directory).changed
    assert pending.read() == waiting
    report = confirm.confirm(1, history_directory=history.directory)
    assert report.changed and report.state == 1 and report.remaining > 0
    assert not os.path.exists(place)
    assert history.outcome(1) == "confirmed"
    for state in (1, None):
        assert confirm.confirm(state, history_directory=history.directory).changed is False


def test_only_one_of_several_decisions_succeeds(waiting):
    assert pending.claim(pending.REVERTING)
    assert not pending.claim(pending.DECIDED)
    with pytest.raises(HistoryError, match="the change after state 1 is being reverted"):
        confirm.confirm(1)


def test_a_rollback_replaces_a_revert_that_waits_for_the_lock_or_has_failed(waiting, place, history):
    assert pending.claim(pending.REVERTING)
    assert confirm.withdraw() == ()
    assert history.outcome(1) == "rolled back"
    assert pending.read() is None and not os.path.exists(place)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (directory.REVERTED, "was not confirmed: the node has rolled back to it"),
        (directory.WITHDRAWN, "was rolled back before it was confirmed"),
        ("", "there was none, or the node was rebooted"),
    ],
)
def test_a_late_confirmation_reports_the_outcome_of_the_change(history, place, outcome, reason):
    if outcome:
        history.note(1, outcome)
    with pytest.raises(HistoryError, match=reason):
        confirm.confirm(1, history_directory=history.directory)
    assert confirm.confirm(None, history_directory=history.directory).changed is False


def test_a_change_other_than_the_pending_one_is_not_confirmed(waiting, history):
    with pytest.raises(HistoryError, match="state 2: another change is pending"):
        confirm.confirm(2, history_directory=history.directory)
    assert pending.read() == waiting


def test_a_rollback_cancels_the_pending_change(waiting, place, history):
    assert confirm.withdraw() == ()
    assert history.outcome(1) == "rolled back"
    assert not os.path.exists(place)
    assert confirm.withdraw() == ()


class Systemctl:
    """Record the calls of systemctl, and answer them all with one result."""

    def __init__(self, status: int = 0, errors: str = "", output: str = "") -> None:
        self.asked = []
        self._done = Completed(status, output, errors)

    def __call__(self, *arguments: str) -> Completed:
        self.asked.append(arguments)
        return self._done


@pytest.fixture
def systemctl(monkeypatch):
    """Provide a function that replaces systemctl, on a machine that appears to be booted by systemd."""

    def install(fake: Systemctl) -> Systemctl:
        monkeypatch.setattr(units, "why_not_systemd", lambda: "")
        monkeypatch.setattr(units, "systemctl", fake)
        return fake

    return install


def test_a_rejected_change_is_reverted_at_once_by_the_unit_of_the_timer(waiting, systemctl):
    fake = systemctl(Systemctl())
    assert confirm.reject(1) == "the node rolls back to state 1 now; kubenode-proxy-revert.service logs the result"
    assert fake.asked == [("start", "--no-block", "kubenode-proxy-revert.service")]
    assert pending.read() == waiting, "the decision is the unit's"


@pytest.mark.parametrize(("status", "errors"), [(5, "Unit kubenode-proxy-revert.service not found."), (1, "")])
def test_where_the_unit_cannot_be_started_the_timer_still_reverts_the_change(waiting, systemctl, status, errors):
    systemctl(Systemctl(status, errors))
    text = confirm.reject()
    assert text.startswith("the change after state 1 waits to be confirmed until 2") and errors in text
    assert "then the node rolls back (kubenode-proxy-revert.service: cannot be started" in text


def test_without_systemd_a_rejected_change_waits_for_its_timeout(waiting, monkeypatch):
    monkeypatch.setattr(units, "why_not_systemd", lambda: "this process is in a different network namespace")
    assert confirm.reject(1).endswith("then the node rolls back (this process is in a different network namespace)")


def test_rejecting_another_change_reverts_nothing(waiting, systemctl):
    fake = systemctl(Systemctl())
    assert confirm.reject(2) == ""
    assert pending.claim(pending.REVERTING)
    assert confirm.reject(1) == "the change after state 1 is being reverted"
    assert pending.claim(pending.REVERTING) is False and not fake.asked


class FreeLock:
    """A convergence lock that nothing else holds."""

    def __init__(self, *_arguments, **_options) -> None:
        pass

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_exception) -> None:
        return None


class Restoration:
    """Replace the part of a rollback that needs a kernel; ``problem`` makes it fail."""

    def __init__(self) -> None:
        self.problem = ""
        self.found = []

    def __call__(self, request, record, **_keywords) -> restore.RollbackReport:
        self.found.append(pending.read())
        if self.problem:
            raise KernelError(self.problem)
        return restore.RollbackReport(
            record=record, changed=True, changes=(), saved=2, stopped=(), warnings=("careful",), durations={}
        )


@pytest.fixture
def restoration(monkeypatch) -> Restoration:
    fake = Restoration()
    for module in (restore, revert):
        monkeypatch.setattr(module, "ConvergenceLock", FreeLock)
        monkeypatch.setattr(module, "KernelHandles", FreeLock)
        monkeypatch.setattr(module, "restore", fake)
    monkeypatch.setattr(restore, "rights_findings", lambda _capabilities: [])
    monkeypatch.setattr(units, "running_units", list)
    return fake


@pytest.fixture
def full_disk(history, monkeypatch) -> None:
    """Let no file be written into the directory of saved states."""

    def refuse(*_arguments) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(directory, "write_whole", refuse)


def test_a_rollback_that_fails_leaves_the_automatic_revert_armed(waiting, place, history, restoration):
    request = restore.RollbackRequest(1, history.directory)
    restoration.problem = "another program holds the xtables lock"
    with pytest.raises(KernelError, match="xtables lock"):
        restore.rollback(request)
    assert pending.read() == waiting and history.outcome(1) is None
    restoration.problem = ""
    assert restore.rollback(request).warnings == ("careful",)
    assert restoration.found == [waiting, waiting]
    assert history.outcome(1) == "rolled back" and not os.path.exists(place)


def test_a_check_of_a_rollback_leaves_the_pending_change(waiting, history, restoration):
    restore.rollback(restore.RollbackRequest(1, history.directory, check=True))
    assert pending.read() == waiting and history.outcome(1) is None


def test_a_pending_change_that_cannot_be_read_is_an_error_before_anything_is_restored(
    waiting, place, history, restoration
):
    with open(f"{place}/pending.json", "w", encoding="utf-8") as file:
        file.write("{")
    with pytest.raises(HistoryError, match=r"pending\.json: cannot be read"):
        restore.rollback(restore.RollbackRequest(1, history.directory))
    assert not restoration.found


NOT_RECORDED = "which is not recorded: .*outcomes.json: cannot be written: No space left on device"


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_does_not_leave_a_confirmation_half_done(waiting, place, history, systemctl):
    fake = systemctl(Systemctl(output="active"))
    (warning,) = confirm.confirm(1, history_directory=history.directory).warnings
    assert re.search(f"the change after state 1 was confirmed, {NOT_RECORDED}", warning)
    assert not os.path.exists(place) and ("stop", "kubenode-proxy-revert.timer") in fake.asked


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_does_not_leave_a_rollback_half_done(waiting, place, history, restoration, systemctl):
    fake = systemctl(Systemctl(output="active"))
    _careful, warning = restore.rollback(restore.RollbackRequest(1, history.directory)).warnings
    assert re.search(f"the change after state 1 was rolled back, {NOT_RECORDED}", warning)
    assert not os.path.exists(place) and ("stop", "kubenode-proxy-revert.timer") in fake.asked


@pytest.mark.usefixtures("full_disk", "restoration")
def test_a_full_disk_does_not_leave_a_revert_half_done(waiting, place, history, systemctl):
    fake = systemctl(Systemctl(output="active"))
    text = revert.revert(1, history.directory, "/run/x", place)
    assert re.search(f"; the change after state 1 was reverted, {NOT_RECORDED}", text)
    assert not os.path.exists(place) and ("stop", "kubenode-proxy-revert.timer") in fake.asked


def test_without_an_answer_of_systemd_a_pending_change_is_kept(waiting, systemctl):
    systemctl(Systemctl(1, "Failed to connect to bus: Connection refused\n"))
    reason = r"kubenode-proxy-revert\.timer: its state cannot be read: Failed to connect to bus: Connection refused"
    with pytest.raises(KernelError, match=reason):
        guard.refuse_if_pending()
    assert pending.read() == waiting
    (warning,) = confirm.confirm(1, history_directory=waiting.history_directory).warnings
    assert re.fullmatch(reason, warning)


def test_a_unit_that_is_not_active_has_a_state(systemctl):
    systemctl(Systemctl(3, output="inactive\n"))
    assert units.is_active("x.timer") is False and units.running_units() == []
    systemctl(Systemctl(output="deactivating\n"))
    assert units.is_active("x.timer") is True


def test_the_directory_of_a_decision_that_was_cut_short_is_removed(waiting, place):
    assert pending.claim(pending.DECIDED)
    assert guard.refuse_if_pending(check=True) is None and os.path.exists(place)
    assert guard.refuse_if_pending() is None and not os.path.exists(place)


def test_a_directory_that_cannot_be_removed_is_only_a_warning(waiting, place):
    assert pending.claim(pending.DECIDED)
    with open(f"{place}/notes", "w", encoding="utf-8"):
        pass
    assert guard.refuse_if_pending() == f"{place}: cannot be removed: Directory not empty"


def test_a_change_that_cannot_be_written_leaves_no_directory(history, place, tmp_path, monkeypatch):
    def refuse(*_arguments) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(guard.pending, "write", functools.partial(pending.write, directory=place))
    monkeypatch.setattr(decisions, "write_whole", refuse)
    monkeypatch.setattr(guard.units, "why_not_systemd", lambda: "")
    monkeypatch.setattr(running, "pack_running", lambda entry: b"")
    with pytest.raises(HistoryError, match="cannot be written: No space left on device"):
        guard.arm(1, 60, history.directory, str(tmp_path / "run"))
    assert not os.path.exists(place)


def test_the_program_reverts_nothing_after_a_rollback(waiting, place, history, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "running_units", list)

    class RollbackFirst:
        """The convergence lock, which a rollback held until now."""

        def __init__(self, *_arguments, **_options) -> None:
            assert confirm.withdraw() == ()

        def __enter__(self) -> None:
            return None

        def __exit__(self, *_exception) -> None:
            return None

    monkeypatch.setattr(revert, "ConvergenceLock", RollbackFirst)
    assert revert.revert(1, history.directory, str(tmp_path / "run"), place) == "rolled back just now"
    assert history.outcome(1) == "rolled back"


def test_a_directory_that_other_users_can_write_is_not_trusted(waiting, place):
    os.chmod(place, 0o775)
    with pytest.raises(HistoryError, match="trusted only if no other user can write"):
        pending.read()


def test_a_file_that_cannot_be_read_is_named(waiting, place):
    with open(f"{place}/pending.json", "w", encoding="utf-8") as file:
        file.write("{")
    with pytest.raises(HistoryError, match=r"pending\.json: cannot be read"):
        pending.read()


@pytest.mark.parametrize(
    ("active", "waits"),
    [((), False), (("kubenode-proxy-revert.timer",), True), (("kubenode-proxy-revert.service",), True)],
)
def test_another_convergence_is_refused_while_the_timer_runs(waiting, place, monkeypatch, active, waits):
    monkeypatch.setattr(guard.units, "why_not_systemd", lambda: "")
    monkeypatch.setattr(guard.units, "is_active", lambda unit: unit in active)
    assert "waits to be confirmed until" in (guard.refuse_if_pending(check=True) or "")
    if waits:
        for check, removes in ((False, False), (True, True)):
            with pytest.raises(HistoryError, match=r"confirm it .* roll it back, or wait"):
                guard.refuse_if_pending(check, removes)
    else:
        assert guard.refuse_if_pending(check=True, removes=True) and pending.read() is not None
        assert "its timer no longer exists" in (guard.refuse_if_pending() or "")
        assert pending.read() is None
        assert guard.refuse_if_pending() is None


@pytest.mark.parametrize("seconds", [0.5, -1, 100_000])
def test_an_invalid_timeout_is_refused(seconds):
    with pytest.raises(PreflightError, match=r"confirm_timeout: .* is not between 1 and 86400 seconds"):
        guard.check_timeout(seconds)


def test_without_systemd_nothing_is_armed(monkeypatch):
    monkeypatch.setattr(guard.units, "why_not_systemd", lambda: "this node was not booted by systemd")
    with pytest.raises(PreflightError, match="not booted by systemd, so nothing would revert the change"):
        guard.check_timeout(60)


def test_a_revert_program_that_does_not_run_is_refused(history, place, tmp_path, monkeypatch):
    write = functools.partial(pending.write, directory=place)
    monkeypatch.setattr(guard.pending, "write", write)
    monkeypatch.setattr(guard.units, "why_not_systemd", lambda: "")
    monkeypatch.setattr(running, "pack_running", lambda entry: b"not a zip application")
    started = []
    monkeypatch.setattr(guard.units, "start_timer", lambda *arguments: started.append(arguments))
    with pytest.raises(HistoryError, match="rolling back to state 1 would not work"):
        guard.arm(1, 60, history.directory, str(tmp_path / "run"))
    assert not started and not os.path.exists(place)
