# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A helper process is ready before the test continues, or the test fails with the reason."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.lab.background import Background, runs_as
from tests.lab.system import LabError


def test_a_helper_runs_until_it_is_closed() -> None:
    with Background(["sh", "-c", "echo ready; exec sleep 60"]) as helper:
        assert helper.process.poll() is None
    assert helper.process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(helper.pid, 0)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no such port >&2; exit 3", "it is not ready; it ended with status 3: no such port"),
        ("echo almost; sleep 60", "instead of 'ready' it said 'almost\\n'; it still runs: no words"),
        ("sleep 60", "it is not ready; it still runs: no words"),
    ],
)
def test_a_helper_that_does_not_become_ready_is_an_error_with_its_output(script: str, words: str) -> None:
    with pytest.raises(LabError, match=re.escape(words)):
        Background(["sh", "-c", script], timeout=0.5)


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(LabError, match="no-such-program cannot be started: No such file or directory"):
        Background(["no-such-program"])


def test_a_condition_may_say_that_it_is_ready(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with Background(["sh", "-c", f"sleep 0.1; touch {mark}; exec sleep 60"], ready=lambda _pid: mark.exists()):
        assert mark.exists()
    with Background(["bash", "-c", "sleep 0.1; exec -a other-name sleep 60"], ready=runs_as("other-name")) as named:
        assert Path(f"/proc/{named.pid}/cmdline").read_bytes().startswith(b"other-name\0")
    with pytest.raises(LabError, match="it ended with status 0"):
        Background([sys.executable, "-c", ""], ready=lambda _pid: False)


def test_a_log_keeps_what_it_wrote(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Background(["sh", "-c", "echo words >&2; echo ready; exec sleep 60"], log=log):
        assert log.read_text() == "words\n"
    with pytest.raises(LabError, match="status 3: no such port"):
        Background(["sh", "-c", "echo no such port >&2; exit 3"], log=log)
    assert log.read_text() == "no such port\n"
