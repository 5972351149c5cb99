# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs one scheduled convergence and writes down how it went, as metrics for node_exporter's textfile collector.

Needs only Python's standard library. The exit status is that of the command, or 0 if that has found
differences when it was asked to look for them.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from typing import Optional

PREFIX = "kubenode_proxy_schedule_"
HELP = {
    "last_run_timestamp_seconds": "When the last run has ended.",
    "last_success_timestamp_seconds": "When the last run that succeeded has ended.",
    "success": "Whether the last run succeeded.",
    "duration_seconds": "How long the last run took.",
    "changed_entries": "Entries of the kernel that differed from the cluster's state at the last run, by kind.",
    "refused_objects": "Invalid objects of the cluster that the last run skipped.",
    "changed_tasks": "Tasks of the playbook that have changed something at the last run.",
    "failed_tasks": "Tasks of the playbook that have failed at the last run.",
    "boot_state_timestamp_seconds": "When the state with which the node boots was written or renewed.",
}
# Only runs of root renew it. Its directory shows other users no more than its time.
BOOT_STATE = "/var/lib/kubenode-proxy-boot/state.json.gz"
# The status of "kubenode-proxy converge --check" when something differs.
DIFFERENT = 3
TEMPORARY = ".metrics-"
# How long a signal may wait until it is passed on, in seconds.
LONGEST_WAIT = 1.0
# More than all metrics take.
MOST_CHARACTERS = 1 << 16
KINDS = ("added", "replaced", "removed")
RECAP = re.compile(r"^\S+\s+: ok=\d+\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.MULTILINE)

# A metric's name and labels, as they are written, and its value.
Samples = list[tuple[str, str, float]]


def converge_samples(output: str) -> Samples:
    """From what ``kubenode-proxy converge --output json`` prints; nothing if that is not a report."""
    try:
        report = json.loads(output)
        counts = report["counts"]
        samples: Samples = [("changed_entries", f'{{kind="{kind}"}}', float(counts[kind])) for kind in KINDS]
        refused = report.get("refused_count", len(report.get("refused", ())))
        return [*samples, ("refused_objects", "", float(refused))]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def pull_samples(output: str) -> Samples:
    """From the recap at the end of what ansible-pull prints; its last lines are those of the playbook."""
    found = RECAP.findall(output)
    if not found:
        return []
    changed, unreachable, failed = (int(word) for word in found[-1])
    return [("changed_tasks", "", float(changed)), ("failed_tasks", "", float(unreachable + failed))]


def small_text(path: str) -> str:
    """The text of a regular file; nothing if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
            return file.read(MOST_CHARACTERS) if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""
    except OSError:
        return ""


def last_success(path: str) -> Optional[float]:
    """The time of the last success that an earlier run has written down."""
    text = small_text(path)
    found = re.search(rf"^{PREFIX}last_success_timestamp_seconds ([0-9.e+]{{1,30}})$", text, re.MULTILINE)
    with contextlib.suppress(ValueError):
        return float(found.group(1)) if found else None
    return None


def render(samples: Samples) -> str:
    """The metrics in Prometheus' text format, each with its help once."""
    lines: list[str] = []
    seen: dict[str, None] = {}
    for name, labels, value in samples:
        if name not in seen:
            seen[name] = None
            lines += [f"# HELP {PREFIX}{name} {HELP[name]}", f"# TYPE {PREFIX}{name} gauge"]
        lines.append(f"{PREFIX}{name}{labels} {value:.15g}")
    return "\n".join([*lines, ""])


def write(path: str, text: str) -> None:
    """Replace the file at once, readable for everybody; systemd has made its directory (StateDirectory=)."""
    directory = os.path.dirname(path)
    # node_exporter reads only names that end in .prom: it never sees these. A run that was killed leaves one.
    for unfinished in glob.glob(os.path.join(glob.escape(directory), f"{TEMPORARY}*")):
        os.unlink(unfinished)
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=directory)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class Termination:
    """Passes SIGTERM on to the command, and survives it, so that the metrics of the run are written.

    systemd sends it when the run takes too long. A signal that is ignored instead would be ignored by the command, too.
    """

    def __init__(self) -> None:
        self.requested = False
        self._command: Optional[subprocess.Popen[str]] = None

    def __call__(self, _number: int, _frame: object) -> None:
        """Handle the signal."""
        self.requested = True
        if self._command is not None:
            self._command.terminate()

    def watch(self, command: subprocess.Popen[str]) -> None:
        """Pass signals on to a command that was just started, also one that came before."""
        self._command = command
        if self.requested:
            command.terminate()


def output_of(process: subprocess.Popen[str]) -> str:
    """Return what the command prints until it ends.

    A signal that arrives while output is read sets only a flag, and one long read would wait for more output before it
    calls the handler: time limits make Python look at the flag.
    """
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=LONGEST_WAIT)[0]


def run(command: list[str], kind: str, termination: Termination) -> tuple[int, Samples]:
    """Run the command; its errors go where ours go, its output as well unless it is a report for programs."""
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
            termination.watch(process)
            output = output_of(process)
    except OSError as error:
        print(f"{command[0]}: cannot be run: {error.strerror}", file=sys.stderr)
        return 127, []
    samples = converge_samples(output) if kind == "converge" else pull_samples(output)
    if kind == "converge" and samples:
        print(", ".join(f"{name}{labels} {value:g}" for name, labels, value in samples))
    else:
        print(output, end="")
    if termination.requested:
        return 128 + signal.SIGTERM, samples
    # With --check, a difference is the requested result and not a failure.
    if kind == "converge" and process.returncode == DIFFERENT and samples:
        return 0, samples
    # A negative status is a signal; a shell would say 128 and its number.
    return process.returncode if process.returncode >= 0 else 128 - process.returncode, samples


def main(arguments: list[str]) -> int:
    """Run, write the metrics, and return the command's status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--metrics", required=True, help="file to write")
    parser.add_argument("--kind", choices=("converge", "pull"), required=True, help="whose output is to be read")
    parser.add_argument("--refusal", default="", help="file with the reason of the unit not to run; empty without one")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command")
    refusal = small_text(options.refusal).strip() if options.refusal else ""
    if refusal:
        print(refusal, file=sys.stderr)
        return report(options.metrics, 1, [], 0.0)
    start = time.monotonic()
    termination = Termination()
    previous = signal.signal(signal.SIGTERM, termination)
    try:
        status, found = run(command, options.kind, termination)
        return report(options.metrics, status, found, time.monotonic() - start)
    finally:
        signal.signal(signal.SIGTERM, previous)


def report(path: str, status: int, found: Samples, duration: float) -> int:
    """Write the metrics of a run; return its status, or 1 if it has succeeded and they cannot be written."""
    now = time.time()
    success = now if status == 0 else last_success(path)
    samples: Samples = [("last_run_timestamp_seconds", "", now)]
    if success is not None:
        samples.append(("last_success_timestamp_seconds", "", success))
    samples += [("success", "", float(status == 0)), ("duration_seconds", "", round(duration, 3)), *found]
    # A node that is not to restore a state has none.
    with contextlib.suppress(OSError):
        samples.append(("boot_state_timestamp_seconds", "", os.lstat(BOOT_STATE).st_mtime))
    try:
        write(path, render(samples))
    except OSError as error:
        print(f"{path}: cannot be written: {error.strerror}", file=sys.stderr)
        return status or 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
