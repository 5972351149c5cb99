# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``python -m tests.lab.demo [--keep]``: run the demonstration; ends non-zero if anything it shows is not true."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence

from tests.conftest import make_link
from tests.lab.cluster import ROOT, Lab
from tests.lab.demo.traffic import perform, requests_for
from tests.lab.system import LabError

VARIABLES = Path(__file__).with_name("variables.yml")
RECAP = re.compile(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.MULTILINE)
KEPT_LINES = 60


class Run(NamedTuple):
    """What a playbook did: its exit status, what it printed, and how many tasks changed something on each node."""

    status: int
    text: str
    changed: Dict[str, int]
    seconds: float


class Demonstration:
    """The steps of the demonstration and what they found to be wrong."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._names = [node.name for node in lab.nodes]
        self._problems: List[str] = []
        self._broken = False
        self._begin = time.monotonic()

    def run(self) -> int:
        """All steps in order; the number of things that were not as they should be."""
        self._say_laboratory()
        for step in (
            self._preview,
            self._converge,
            self._again,
            self._kernel,
            self._traffic,
            self._drift,
            self._clean_up,
        ):
            step()
            if self._broken:
                break
        self._heading("Result")
        for problem in self._problems:
            self._print(f"WRONG: {problem}")
        seconds = time.monotonic() - self._begin
        self._print(f"{'all facts shown are true' if not self._problems else 'failed'}, {seconds:.0f} s")
        return len(self._problems)

    # ---- output

    def _print(self, text: str) -> None:
        sys.stdout.write(text.rstrip() + "\n")
        sys.stdout.flush()

    def _heading(self, text: str) -> None:
        self._print(f"\n=== {text}")

    def _expect(self, condition: bool, problem: str) -> None:
        if not condition:
            self._problems.append(problem)
            self._print(f"WRONG: {problem}")

    def _extract(self, text: str, limit: int = KEPT_LINES) -> None:
        lines = text.rstrip().splitlines()
        self._print("\n".join(lines[:limit]))
        if len(lines) > limit:
            self._print(f"... {len(lines) - limit} more lines")

    # ---- Ansible

    def _playbook(self, name: str, *options: str) -> Run:
        argv = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(self._lab.inventory)]
        argv += ["-e", f"@{VARIABLES}", "-e", f"service_proxy_snapshot={self._lab.snapshot}"]
        argv += [f"kubenode.proxy.{name}", *options]
        self._print(f"$ ansible-playbook -i INVENTORY kubenode.proxy.{name} {' '.join(options)}")
        environment = {
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_HOME": str(self._lab.directory / "ansible"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_DISPLAY_OK_HOSTS": "0",
            "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "0",
            "ANSIBLE_DEPRECATION_WARNINGS": "0",
            "LC_ALL": "C.UTF-8",
        }
        begin = time.monotonic()
        done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        changed = {match[0]: int(match[1]) for match in RECAP.findall(done.stdout)}
        return Run(done.returncode, done.stdout, changed, time.monotonic() - begin)

    def _succeeds(self, run: Run, what: str) -> None:
        if run.status != 0:
            self._broken = True
            self._print(run.text[-3000:])
        self._expect(run.status == 0, f"{what} ended with status {run.status}")
        missing = [name for name in self._names if name not in run.changed]
        self._expect(not missing, f"{what} did not reach {', '.join(missing)}")

    # ---- steps

    def _say_laboratory(self) -> None:
        self._heading("A laboratory cluster: two nodes, their pods, a client outside")
        for node in self._lab.nodes:
            kind = "user-mode Linux" if node.own_kernel else "network namespace"
            release = self._lab.output(node.name, "uname -r").strip()
            self._print(f"{node.name:<13} {node.address:<12} pods {node.pods:<14} kernel {release} ({kind})")

    def _preview(self) -> None:
        self._heading("Preview: nothing is changed")
        run = self._playbook("converge", "--check", "--diff")
        self._extract(run.text, 120)
        self._print(run.text[run.text.rfind("PLAY RECAP") :])
        self._succeeds(run, "the preview")
        self._expect(all(run.changed.get(name) for name in self._names), "the preview announced no change")
        for name in self._names:
            self._expect(not self._rules(name), f"the preview changed {name}")

    def _rules(self, name: str) -> str:
        """What the node's kernel holds of kube-proxy's names, empty before convergence and after clean-up."""
        commands = "iptables-legacy-save 2>/dev/null; iptables-nft-save 2>/dev/null; ipset -n list 2>/dev/null"
        text = self._lab.output(name, f"{commands}; ipvsadm -Sn 2>/dev/null; ip -br link; true")
        kept = [line for line in text.splitlines() if line.startswith(("-A KUBE-", "KUBE-", "-A -t", "kube-ipvs0"))]
        return "\n".join(kept)

    def _converge(self) -> None:
        self._heading("Convergence")
        run = self._playbook("converge")
        self._extract(run.text)
        self._succeeds(run, "the convergence")
        self._expect(all(run.changed.get(name) for name in self._names), "the convergence changed nothing")
        self._print(f"{run.seconds:.1f} s")

    def _again(self) -> None:
        self._heading("The same again: changed=0")
        run = self._playbook("converge")
        self._print(run.text[run.text.rfind("PLAY RECAP") :])
        self._succeeds(run, "the second convergence")
        self._expect(not any(run.changed.values()), "the second convergence changed something")
        self._print(f"{run.seconds:.1f} s")

    def _kernel(self) -> None:
        self._heading("What the kernels hold")
        for node in self._lab.nodes:
            if node.own_kernel:
                self._print(f"{node.name}: ipvsadm -Ln")
                table = self._lab.output(node.name, "ipvsadm -Ln")
                self._extract(table, 24)
                self._expect("10.96.0.10:53" in table, f"{node.name} has no virtual server for DNS")
            else:
                self._print(f"{node.name}: iptables-save, the chains of the Service shop/web")
                table = self._lab.output(node.name, "iptables-save -t nat")
                self._extract("\n".join(line for line in table.splitlines() if "shop/web" in line), 24)
                self._expect("KUBE-SVC-" in table, f"{node.name} has no Service chains")

    def _traffic(self) -> None:
        for node in self._lab.nodes:
            self._heading(f"Who answers, through {node.name}")
            for request in requests_for(self._lab, node):
                outcome = perform(self._lab, node, request)
                target = f"[{request.address}]" if ":" in request.address else request.address
                self._print(f"{request.title:<40} {target}:{request.port}  {outcome.words}")
                if outcome.problem:
                    self._expect(False, f"{node.name}: {request.title}: {outcome.words}; {outcome.problem}")

    def _drift(self) -> None:
        self._heading("Drift: someone deletes entries by hand, the report says so and changes nothing")
        for node in self._lab.nodes:
            command = "ipvsadm -D -u 10.96.0.10:53" if node.own_kernel else "iptables -t nat -F KUBE-SERVICES"
            self._print(f"{node.name}: {command}")
            self._lab.output(node.name, command)
        run = self._playbook("verify")
        self._print(run.text[run.text.rfind("PLAY RECAP") :])
        self._expect(run.status != 0, "verify did not notice the drift")
        run = self._playbook("converge")
        self._print(run.text[run.text.rfind("PLAY RECAP") :])
        self._succeeds(run, "the repair")
        self._expect(all(run.changed.get(name) for name in self._names), "the repair changed nothing")

    def _clean_up(self) -> None:
        self._heading("Clean-up: the nodes are as before")
        run = self._playbook("cleanup")
        self._print(run.text[run.text.rfind("PLAY RECAP") :])
        self._succeeds(run, "the clean-up")
        for name in self._names:
            left = self._rules(name)
            self._expect(not left, f"the clean-up left on {name}: {left[:300]}")


def _free_lab() -> Lab:
    """A laboratory that nobody uses, so that two demonstrations can run at once; its addresses are its own anyway."""
    for name in ("demo", *(f"demo{number}" for number in range(2, 10))):
        lab = Lab(name)
        if "running" not in lab.status().values():
            return lab
    raise LabError("nine demonstrations are running: end one with python -m tests.lab --name demo down")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the demonstration in a laboratory of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the laboratory running; ends with 'tests.lab down'")
    options = parser.parse_args(arguments)
    make_link()
    try:
        lab = _free_lab()
        lab.up()
        try:
            return 1 if Demonstration(lab).run() else 0
        finally:
            if options.keep:
                sys.stdout.write(f"left running; end it with: python -m tests.lab --name {lab.name} down\n")
            else:
                lab.down()
    except LabError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
