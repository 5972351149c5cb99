# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the wire lab with a kube-proxy and with this project, in each mode, and keep what was observed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from tests.conformance.wirelab.arguments import HOME, LAUNCHER
from tests.conformance.wirelab.cli import REPORT
from tests.conformance.wirelab.results import StepResult

#: The errors of all cases, in the folder of a side.
ERRORS = "errors.json"
THEIRS, OURS = "kube-proxy", "here"
RUNNER = str(HOME / "runners" / "kube-proxy")
JOBS, GUESTS, GUEST_SECONDS = 6, 2, 7200


@dataclass(frozen=True)
class Setting:
    """A mode and where it is run. ``families``: the cases, as the lab names them; with ``--full``, all in any case."""

    name: str
    mode: str
    iptables: str = "system"
    families: str = "recorded"
    guest: bool = False

    def command(self, side: str, folder: Path, full: bool, cases: Sequence[str] = (), alone: bool = False) -> list[str]:
        """Return the command line of the lab. ``alone``: one case after the other."""
        words = [str(LAUNCHER)]
        if self.guest:
            guests = 1 if alone else GUESTS
            words += ["uml", "--jobs", str(guests), "--timeout", str(GUEST_SECONDS), "--"]
        words += ["run", "--mode", self.mode, "--iptables", self.iptables, "--any-proxy", "--json"]
        words += ["--families", "all" if full else self.families, "--jobs", "1" if self.guest or alone else str(JOBS)]
        words += ["--save", str(folder), "--keep-logs", str(folder / "logs")]
        words += [] if self.guest else ["--instance", f"p{os.getpid()}-"]
        if side == THEIRS:
            words += ["--runner", RUNNER, "--runner-cleanup", f"{RUNNER} --cleanup"]
        else:
            words.append("--agent")
        return [*words, *(word for case in cases for word in ("--cases", case))]


SETTINGS = (
    Setting("iptables", "iptables", iptables="nft", families="all"),
    Setting("iptables-legacy", "iptables", iptables="legacy"),
    Setting("nftables", "nftables", families="all"),
    # The kernel of a host seldom has IPVS. A case takes half a minute in user-mode Linux.
    Setting("ipvs", "ipvs", iptables="legacy", guest=True),
)


class Observed:
    """What one side did in one setting: a folder with a folder for each case."""

    def __init__(self, setting: Setting, side: str, output: Path) -> None:
        self.setting = setting
        self.side = side
        self.folder = output / setting.name / side
        self.seconds = 0.0
        #: Why nothing was observed, if so.
        self.failure = ""

    def run(self, program: Path, full: bool, cases: Sequence[str], alone: bool = False) -> None:
        """Run the lab; with ``alone``, only repeat these cases."""
        if not alone:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LAB_")}
        environment["LAB_KUBE_PROXY"] = str(program)
        start, log = time.monotonic(), self.folder / "lab.log"
        with open(log, "ab") as file:
            command = self.setting.command(self.side, self.folder, full, cases, alone)
            status = subprocess.run(command, env=environment, stdout=file, stderr=file, check=False).returncode
        self.seconds += time.monotonic() - start
        if status not in (0, 1) or not (self.folder / REPORT).exists():
            self.failure = _last_line(log) or f"the lab ended with {status}"
            return
        rows = json.loads((self.folder / REPORT).read_text(encoding="utf-8"))["cases"]
        errors = {**self.errors(), **{row["case"]: row["error"] for row in rows}}
        (self.folder / ERRORS).write_text(json.dumps(errors, indent=1), encoding="utf-8")

    def errors(self) -> dict[str, Optional[str]]:
        """Return the error of each case in its last run, None for one that was run."""
        path = self.folder / ERRORS
        errors: dict[str, Optional[str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return errors

    def steps(self, case: str) -> Optional[list[StepResult]]:
        """Return what was observed in a case; None if it could not be run."""
        path = self.folder / case / f"observed-{self.setting.mode}.json"
        if not path.exists():
            return None
        steps: list[StepResult] = json.loads(path.read_text(encoding="utf-8"))["steps"]
        return steps

    def state(self, case: str) -> Path:
        """Return the path of the programmed state of a case."""
        return self.folder / case / f"state-{self.setting.mode}.txt"

    def error(self, case: str) -> str:
        """Return why a case could not be run, with the last line that the proxy wrote."""
        error = self.errors().get(case) or "was not run"
        said = _last_line(self.folder / "logs" / f"{case}-{self.setting.mode}.log")
        return f"{error}: {said}" if said else error


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
