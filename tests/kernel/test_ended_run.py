# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The timer's program ends its command when systemd requests it, at whatever moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import wait_for

SCRIPT = Path(__file__).resolve().parents[2] / "roles/schedule/files/scheduled_run.py"


def test_a_run_is_ended_while_its_output_is_read(tmp_path):
    """The kernel delivers the signal at the end of a call that has read something, before the next one."""
    code = """import os, pathlib, sys, time
while not os.path.exists(sys.argv[1] + "/traced"):
    time.sleep(0.01)
print("working", flush=True)
pathlib.Path(sys.argv[1], "started").touch()
time.sleep(60)"""
    metrics = tmp_path / "out.prom"
    command = [sys.executable, "-c", code, str(tmp_path)]
    argv = [sys.executable, str(SCRIPT), "--metrics", str(metrics), "--kind", "pull", "--", *command]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        process_status = Path(f"/proc/{process.pid}/status")
        wait_for(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text, 20.0, 0.01)
        delayed = ["-e", "trace=read", "-e", "inject=read:delay_exit=1000000", "-p", str(process.pid)]
        with subprocess.Popen(["strace", "-qq", "-o", os.devnull, *delayed]) as strace:
            wait_for(lambda: f"TracerPid:\t{strace.pid}\n" in process_status.read_text(), 20.0, 0.01)
            (tmp_path / "traced").touch()
            wait_for((tmp_path / "started").exists, 20.0, 0.01)
            process.terminate()
            output, _errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (143, "working\n")
