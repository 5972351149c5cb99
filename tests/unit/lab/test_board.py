# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs of pytest with the same board together run each file once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Small files of tests, which take no time.
FIRST, SECOND = "tests/unit/lab/test_wire.py", "tests/unit/lab/test_steps.py"


def passed(board: Path, *files: str) -> list[str]:
    """Return the files of the tests that passed in a run."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "TEST_BOARD": str(board), "PYTEST_ADDOPTS": "", "FEW_EXAMPLES": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted({line.split("::")[0] for line in done.stdout.splitlines() if " PASSED" in line})


def test_a_file_claimed_by_another_run_is_skipped(tmp_path: Path) -> None:
    assert passed(tmp_path, FIRST) == [FIRST]
    assert passed(tmp_path, FIRST, SECOND) == [SECOND]
    assert passed(tmp_path, FIRST, SECOND) == []
