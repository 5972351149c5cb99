# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The timer's program: the command's result as metrics, written atomically, and the command's exit status."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "roles/schedule/files/scheduled_run.py"
spec = importlib.util.spec_from_file_location("scheduled_run", SCRIPT)
scheduled_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scheduled_run)

REPORT = {"changed": True, "counts": {"added": 3, "replaced": 2, "removed": 1}, "refused": ["Service a/b: x"]}
RECAP = "PLAY RECAP ***\nnode-1    : ok=5    changed=2    unreachable=0    failed=1    skipped=0\n"


def run(tmp_path, kind, output, status=0):
    code = f"import sys; print({output!r}); sys.exit({status})"
    path = tmp_path / "metrics/out.prom"
    path.parent.mkdir(exist_ok=True)
    result = scheduled_run.main(["--metrics", str(path), "--kind", kind, "--", sys.executable, "-c", code])
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    values = dict(line.replace(scheduled_run.PREFIX, "").rsplit(" ", 1) for line in lines)
    return result, {name: float(value) for name, value in values.items()}


def test_report_of_a_convergence(tmp_path):
    status, found = run(tmp_path, "converge", json.dumps(REPORT))
    assert status == 0 and found["success"] == 1 and found["refused_objects"] == 1
    assert [found[f'changed_entries{{kind="{kind}"}}'] for kind in ("added", "replaced", "removed")] == [3, 2, 1]
    assert found["last_success_timestamp_seconds"] == found["last_run_timestamp_seconds"] > 1_600_000_000


def test_the_age_of_the_state_with_which_the_node_boots_is_shown_if_it_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduled_run, "BOOT_STATE", str(tmp_path / "state"))
    assert "boot_state_timestamp_seconds" not in run(tmp_path, "converge", json.dumps(REPORT))[1]
    (tmp_path / "state").touch()
    os.utime(tmp_path / "state", (5e8, 5e8))
    for status in (0, 1):
        assert run(tmp_path, "converge", json.dumps(REPORT), status)[1]["boot_state_timestamp_seconds"] == 5e8


def test_a_difference_in_check_mode_is_no_failure(tmp_path):
    assert run(tmp_path, "converge", json.dumps(REPORT), 3)[0] == 0
    status, found = run(tmp_path, "converge", "no report", 3)
    assert (status, found["success"]) == (3, 0)


def test_a_failure_keeps_the_time_of_the_last_success_but_no_old_counts(tmp_path):
    success = run(tmp_path, "converge", json.dumps(REPORT))[1]["last_success_timestamp_seconds"]
    status, found = run(tmp_path, "converge", "", 1)
    assert (status, found["success"]) == (1, 0)
    assert found["last_success_timestamp_seconds"] == success
    assert not [name for name in found if "changed" in name or "refused" in name]


def test_a_run_that_the_unit_refuses_is_a_failure_with_the_reason(tmp_path, capfd):
    (tmp_path / "refusal").write_text("kubenode-proxy: kube-proxy runs on this node [kube-proxy]\n")
    path = tmp_path / "out.prom"
    words = ["--metrics", str(path), "--kind", "converge", "--refusal", str(tmp_path / "refusal")]
    assert scheduled_run.main([*words, "--", "touch", str(tmp_path / "ran")]) == 1
    assert capfd.readouterr().err == "kubenode-proxy: kube-proxy runs on this node [kube-proxy]\n"
    assert "kubenode_proxy_schedule_success 0" in path.read_text() and not (tmp_path / "ran").exists()
    (tmp_path / "refusal").write_text("")
    scheduled_run.main([*words, "--", "touch", str(tmp_path / "ran")])
    assert (tmp_path / "ran").exists()


def test_recap_of_a_playbook(tmp_path):
    status, found = run(tmp_path, "pull", "anything\n" + RECAP, 2)
    assert (status, found["success"], found["changed_tasks"], found["failed_tasks"]) == (2, 0, 2, 1)


def test_the_file_is_complete_and_readable_without_temporary_files(tmp_path):
    path = tmp_path / "metrics/out.prom"
    path.parent.mkdir()
    (path.parent / ".metrics-of-a-killed-run").touch()
    run(tmp_path, "converge", json.dumps(REPORT))
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]
    text = path.read_text()
    assert text.endswith("\n") and text.count("# TYPE kubenode_proxy_schedule_changed_entries gauge") == 1


def test_command_that_does_not_exist_and_signal(tmp_path, capsys):
    path = str(tmp_path / "out.prom")
    assert scheduled_run.main(["--metrics", path, "--kind", "pull", "--", "/does/not/exist"]) == 127
    assert "/does/not/exist: cannot be run" in capsys.readouterr().err
    code = "import os; os.kill(os.getpid(), 9)"
    assert scheduled_run.main(["--metrics", path, "--kind", "pull", "--", sys.executable, "-c", code]) == 137


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_run_that_systemd_ends_is_a_failure_and_not_the_success_before(tmp_path, whole_group):
    success = run(tmp_path, "pull", RECAP)[1]["last_success_timestamp_seconds"]
    path = tmp_path / "metrics/out.prom"
    code = f"import pathlib, time; print('working', flush=True); pathlib.Path({str(tmp_path / 'started')!r}).touch()"
    command = [sys.executable, "-c", f"{code}; time.sleep(60)"]
    argv = [sys.executable, str(SCRIPT), "--metrics", str(path), "--kind", "pull", "--", *command]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGTERM)
        output, _errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (143, "working\n")
    text = path.read_text()
    assert f"{scheduled_run.PREFIX}success 0\n" in text
    assert f"{scheduled_run.PREFIX}last_success_timestamp_seconds {success:.15g}\n" in text


@pytest.mark.parametrize("output", ["[]", "{}", '{"counts": null}', "null", '{"counts": {"added": "x"}}'])
def test_output_that_is_no_report_gives_no_counts(output):
    assert scheduled_run.converge_samples(output) == []
