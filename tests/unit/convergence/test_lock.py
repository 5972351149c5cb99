# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lock of a node, and its removal while other processes wait for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime import lock as lock_module
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.ledger import (
    Flows,
    forget,
    write_ledger,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.lock import ConvergenceLock


def held_by(directory: Path) -> str:
    return (directory / "lock").read_text()


def test_nothing_is_left_after_removal(tmp_path):
    state = tmp_path / "state"
    with ConvergenceLock(str(state), 0.1, "rollback") as lock:
        assert held_by(state) == f"{os.getpid()} rollback"
        write_ledger(str(state), Flows(serving="c"))
        (state / "agent").mkdir()
        (state / "agent" / "agent.sock").touch()
        forget(str(state))
        forget(str(state))
        lock.remove()
    assert list(tmp_path.iterdir()) == []


def test_files_of_other_programs_in_the_directory_are_kept(tmp_path):
    (tmp_path / "other").touch()
    with ConvergenceLock(str(tmp_path), 0.1) as lock:
        forget(str(tmp_path))
        lock.remove()
        lock.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_process_that_waited_for_a_removed_lock_acquires_a_new_one(tmp_path):
    """Two processes wait while the file is removed; they get the lock one after the other, never at the same time."""
    state = tmp_path / "state"
    inside: list[int] = []
    most: list[int] = []
    failed: list[BaseException] = []

    def take(number: int) -> None:
        try:
            with ConvergenceLock(str(state), 60.0, f"number {number}") as lock:
                inside.append(number)
                most.append(len(inside))
                assert held_by(state) == f"{os.getpid()} number {number}"
                # Once the file is removed, the next process may hold a lock on a new file.
                inside.remove(number)
                lock.remove()
        except BaseException as error:
            failed.append(error)

    waiting = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    with ConvergenceLock(str(state), 0.1) as lock:
        for thread in waiting:
            thread.start()
        lock.remove()
    for thread in waiting:
        thread.join()
    assert failed == []
    assert most == [1] * len(waiting)
    assert not state.exists()


def test_a_directory_removed_between_two_calls_is_created_again(tmp_path, monkeypatch):
    state = tmp_path / "state"
    really_open = os.open
    gone: list[str] = []

    def open_once_late(path, *arguments):
        if str(path) == str(state / "lock") and not gone:
            gone.append(path)
            os.rmdir(state)
        return really_open(path, *arguments)

    monkeypatch.setattr(lock_module.os, "open", open_once_late)
    with ConvergenceLock(str(state), 5.0):
        assert held_by(state)
    assert gone


def test_a_lock_that_cannot_be_acquired_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    with (
        pytest.raises(KernelError, match=r"file/lock: cannot be opened: File exists"),
        ConvergenceLock(str(blocked), 9.0),
    ):
        pass
    with (
        pytest.raises(KernelError, match=r"file/state/lock: cannot be opened: Not a directory"),
        ConvergenceLock(str(blocked / "state"), 0.1),
    ):
        pass


@pytest.mark.parametrize(
    ("process", "holder", "said"),
    [
        (os.getpid(), lock_module.AGENT, "is running and programs the node until it is stopped"),
        (os.getpid(), "another convergence", "did not end within 0.3 seconds"),
        # The agent has ended, and the current holder has not written its name yet.
        (2**22 + 1, lock_module.AGENT, "did not end within 0.3 seconds"),
    ],
    ids=["agent", "convergence", "ended agent"],
)
def test_only_a_running_agent_is_not_waited_for(tmp_path, monkeypatch, process, holder, said):
    waits: list[float] = []
    monkeypatch.setattr(lock_module.time, "sleep", waits.append)
    clock = iter(number / 10 for number in range(100))
    monkeypatch.setattr(lock_module.time, "monotonic", lambda: next(clock))
    with ConvergenceLock(str(tmp_path), 0.1):
        (tmp_path / "lock").write_text(f"{process} {holder}")
        with pytest.raises(KernelError, match=said), ConvergenceLock(str(tmp_path), 0.3):
            pass
        assert bool(waits) is ("0.3 seconds" in said)
        # A check, which takes no lock, says the same.
        with pytest.raises(KernelError, match=said) if not waits else contextlib.nullcontext():
            ConvergenceLock(str(tmp_path), 0.0).refuse_agent()
        with (
            pytest.raises(KernelError, match=r"0\.2 seconds"),
            ConvergenceLock(str(tmp_path), 0.2, outlasts_agent=True),
        ):
            pass


def test_another_program_that_holds_the_lock_is_named(tmp_path):
    """The file still has the name of the last convergence, whose process ID may be that of any process now."""
    with ConvergenceLock(str(tmp_path), 0.1, lock_module.AGENT):
        pass
    command = ["flock", str(tmp_path / "lock"), "sh", "-c", "echo held; read line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "held\n"
        with (
            pytest.raises(
                KernelError, match=rf"held by process {program.pid} \(flock\), and did not end within 0\.1 seconds"
            ),
            ConvergenceLock(str(tmp_path), 0.1),
        ):
            pass
