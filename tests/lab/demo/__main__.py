# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``python -m tests.lab.demo [--keep]``: run the demonstration; exit non-zero if anything it shows is not true.

The nodes in iptables and nftables mode are network namespaces on the host's kernel. The node in ipvs mode is a third
one where that kernel has ip_vs loaded; otherwise it is a guest in user-mode Linux, which boots, converges and is
cleaned up while the others are shown. Where neither is possible, there is no such node.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Callable, Optional, Sequence

from tests.conftest import make_link
from tests.lab.cluster import Lab
from tests.lab.demo.nodes import host_has_ipvs, write_snapshot
from tests.lab.demo.playbooks import Playbooks, Run
from tests.lab.demo.traffic import perform_all
from tests.lab.system import LabError
from tests.lab.topology import LabNode, demonstration_nodes

KEPT_LINES = 24
PREVIEW_LINES = 60
#: How long `make demo` took before this program started, e.g. to install packages.
PREPARED = "DEMO_STARTED"
RULES = {
    "iptables": "iptables-legacy-save 2>/dev/null; iptables-nft-save 2>/dev/null; true",
    "nftables": "nft list tables",
    "ipvs": "iptables-legacy-save 2>/dev/null; ipset -n list; ipvsadm -Sn; ip -br link show type dummy; true",
}
# A command that shows what each mode programs for the Service shop/web, and a line that it must print.
SHOWN: dict[str, tuple[str, str, str]] = {
    "iptables": ("iptables-save -t nat | grep shop/web", "the rules of the Service shop/web", "KUBE-SVC-"),
    "nftables": (
        "nft list table ip kube-proxy | grep -E '10.96.10.1 |map service-|chain services'",
        "the table kube-proxy, in part",
        "10.96.10.1 ",
    ),
    "ipvs": ("ipvsadm -Ln", "virtual servers and real servers", "10.96.0.10:53"),
}
BROKEN = {
    "iptables": "iptables -t nat -F KUBE-SERVICES",
    "nftables": "nft flush map ip kube-proxy service-frontends",
}


class Demonstration:
    """Runs the steps of the demonstration and collects the facts that turn out to be false."""

    def __init__(self, lab: Lab, begin: float) -> None:
        self._lab = lab
        self._begin = begin
        self._playbooks = Playbooks(lab)
        self._shown = [node for node in lab.nodes if node.mode != "ipvs"]
        self._ipvs = next((node for node in lab.nodes if node.mode == "ipvs"), None)
        self._problems: list[str] = []
        self._again: Optional[Future[Run]] = None
        self._ipvs_clean_up: Optional[Future[Run]] = None

    def run(self) -> int:
        """Run all steps; return the number of facts that are false. Raises LabError if a node does not come up."""
        self._show_laboratory()
        steps: list[Callable[[], bool]] = [
            self._preview,
            self._converge,
            self._kernels,
            self._traffic,
            self._second_run,
        ]
        node = self._ipvs
        if node is not None:
            waits = partial(self._lab.wait, node)
            ipvs = self._playbooks.start("converge", "--limit", node.name, after=waits)
            steps.append(lambda: self._other_kernel(node, ipvs))
        steps += [self._drift, self._clean_up]
        for step in steps:
            if not step():
                break
        self._summary()
        return len(self._problems)

    # ---- output

    def _print(self, text: str) -> None:
        sys.stdout.write(text.rstrip() + "\n")
        sys.stdout.flush()

    def _heading(self, text: str) -> None:
        self._print(f"\n=== {text}")

    def _expect(self, condition: bool, problem: str) -> bool:
        if not condition:
            self._problems.append(problem)
            self._print(f"FALSE: {problem}")
        return condition

    def _extract(self, text: str, limit: int = KEPT_LINES) -> None:
        lines = text.rstrip().splitlines()
        self._print("\n".join(lines[:limit]))
        if len(lines) > limit:
            self._print(f"... {len(lines) - limit} more lines")

    # ---- playbooks

    def _others(self, name: str, *options: str) -> Future[Run]:
        return self._playbooks.start(name, "--limit", "lab-iptables,lab-nftables", *options)

    def _finish(self, running: Future[Run], what: str, names: Sequence[str], succeeds: bool = True) -> Optional[Run]:
        """Wait for a playbook and judge its status; None if it is not as expected, since later steps build on it."""
        run = running.result()
        self._print(f"$ {run.command}")
        wanted = run.status == 0 if succeeds else run.status == 2
        missing = [name for name in names if name not in run.changed]
        if not wanted or missing:
            self._print(run.text[-3000:])
        good = self._expect(wanted, f"{what}: exit status {run.status}")
        good = self._expect(not missing, f"{what} did not reach {', '.join(missing)}") and good
        return run if good else None

    @property
    def _names(self) -> list[str]:
        return [node.name for node in self._shown]

    # ---- steps: each returns whether the next one makes sense

    def _show_laboratory(self) -> None:
        self._heading("A laboratory cluster: a node for each mode, their pods, a client outside")
        for node in self._lab.nodes:
            kind = "user-mode Linux, booting meanwhile" if node.own_kernel else f"namespace on {os.uname().release}"
            self._print(f"{node.name:<13} {node.address:<12} pods {node.pods:<14} {kind}")
        if self._ipvs is None:
            self._print(
                f"ipvs mode is not shown: this kernel has no ip_vs loaded, and no guest runs on {os.uname().machine}"
            )

    def _rules(self, node: LabNode) -> str:
        """Return what the node's kernel holds of kube-proxy's names: empty before convergence and after clean-up."""
        marks = ("-A KUBE-", "KUBE-", "-A -t", "kube-ipvs0", "table ip kube-proxy", "table ip6 kube-proxy")
        text = self._lab.output(node.name, RULES[node.mode])
        return "\n".join(line for line in text.splitlines() if line.startswith(marks))

    def _preview(self) -> bool:
        self._heading("Preview: nothing is changed")
        run = self._finish(self._others("converge", "--check", "--diff"), "the preview", self._names)
        if run is None:
            return False
        self._extract("\n".join(line for line in run.text.splitlines() if line[:1] in "+-"), PREVIEW_LINES)
        self._print(run.recap)
        self._expect(all(run.changed.get(name) for name in self._names), "the preview announced no change")
        for node in self._shown:
            self._expect(not self._rules(node), f"the preview changed {node.name}")
        return True

    def _converge(self) -> bool:
        self._heading("Convergence")
        run = self._finish(self._others("converge"), "the convergence", self._names)
        if run is None:
            return False
        self._print(run.recap)
        # The second run is in progress while the kernels and their traffic are shown.
        self._again = self._others("converge")
        return self._expect(all(run.changed.get(name) for name in self._names), "the convergence changed nothing")

    def _kernels(self) -> bool:
        self._heading("What the kernel holds")
        # All nodes are shown even if the first one is wrong.
        return False not in {node.name: self._kernel(node) for node in self._shown}.values()

    def _kernel(self, node: LabNode) -> bool:
        command, title, wanted = SHOWN[node.mode]
        self._print(f"{node.name}: {title}")
        table = self._lab.output(node.name, command)
        self._extract(table)
        return self._expect(wanted in table, f"{node.name}: nothing with {wanted} is programmed")

    def _traffic(self) -> bool:
        return False not in {node.name: self._answers(node) for node in self._shown}.values()

    def _answers(self, node: LabNode) -> bool:
        self._heading(f"Who answers, through {node.name}")
        good = True
        for request, words, problem in perform_all(self._lab, node):
            target = f"[{request.address}]" if ":" in request.address else request.address
            self._print(f"{request.title:<40} {target}:{request.port}  {words}")
            if problem:
                good = self._expect(False, f"{node.name}: {request.title}: {words}; {problem}")
        return good

    def _second_run(self) -> bool:
        self._heading("The same again: changed=0")
        assert self._again is not None
        run = self._finish(self._again, "the second convergence", self._names)
        if run is None:
            return False
        self._print(run.recap)
        return self._expect(not any(run.changed.values()), "the second convergence changed something")

    def _drift(self) -> bool:
        self._heading("Drift: entries are deleted by hand; verify reports it, converge repairs it")
        for node in self._shown:
            self._print(f"{node.name}: {BROKEN[node.mode]}")
            self._lab.output(node.name, BROKEN[node.mode])
        run = self._finish(self._others("verify"), "verify, which must fail", self._names, succeeds=False)
        if run is None:
            return False
        self._extract("\n".join(line for line in run.text.splitlines() if "drift" in line), 6)
        run = self._finish(self._others("converge"), "the repair", self._names)
        if run is None:
            return False
        self._print(run.recap)
        return self._expect(all(run.changed.get(name) for name in self._names), "the repair changed nothing")

    def _other_kernel(self, node: LabNode, converging: Future[Run]) -> bool:
        release = "" if converging.done() else " (waiting for the guest)"
        self._heading(f"IPVS{release}")
        run = self._finish(converging, f"the convergence of {node.name}", [node.name])
        if run is None:
            return False
        self._print(f"{run.recap}\nkernel {self._lab.output(node.name, 'uname -r').strip()}")
        good = self._kernel(node)
        good = self._answers(node) and good
        # A guest takes longer than a namespace: it is cleaned up while the others are shown further.
        self._ipvs_clean_up = self._playbooks.start("cleanup", "--limit", node.name)
        return good

    def _clean_up(self) -> bool:
        self._heading("Clean-up: the nodes are as before")
        started = [(self._others("cleanup"), self._names)]
        if self._ipvs is not None and self._ipvs_clean_up is not None:
            started.append((self._ipvs_clean_up, [self._ipvs.name]))
        for running, names in started:
            run = self._finish(running, "the clean-up", names)
            if run is None:
                return False
            self._print(run.recap)
        for node in self._lab.nodes:
            left = self._rules(node)
            self._expect(not left, f"the clean-up left on {node.name}: {left[:300]}")
        return True

    def _summary(self) -> None:
        self._heading("Result")
        for problem in self._problems:
            self._print(f"FALSE: {problem}")
        now = time.time()
        prepared = float(os.environ.get(PREPARED) or self._begin)
        self._print(f"prepared in {self._begin - prepared:.0f} s, shown in {now - self._begin:.0f} s")
        if self._problems:
            return
        modes = "two" if self._ipvs is None else "three"
        self._print(
            f"all facts shown are true: a preview that changes nothing, {modes} modes that serve the same Services,\n"
            "a second run without a change, drift found and repaired, nodes left as they were.\n"
            "Next: preview your own nodes, which changes nothing on them (README.md, Installation),\n"
            "or look around in a laboratory that stays up: .venv/bin/python -m tests.lab.demo --keep"
        )


def _free_name() -> str:
    """Return the name of a laboratory that is not running, so that two demonstrations can run at once."""
    for name in ("demo", *(f"demo{number}" for number in range(2, 10))):
        if "running" not in Lab(name).status().values():
            return name
    raise LabError("nine demonstrations are running: end one with python -m tests.lab --name demo down")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the demonstration in a separate laboratory."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the laboratory running; ends with 'tests.lab down'")
    options = parser.parse_args(arguments)
    begin = time.time()
    make_link()
    with tempfile.TemporaryDirectory(prefix="kubenode-demo-") as directory:
        try:
            nodes = demonstration_nodes(host_has_ipvs())
            snapshot = Path(directory, "cluster.json")
            write_snapshot(snapshot, nodes)
            lab = Lab(_free_name(), snapshot, layout=nodes)
            lab.up(later=[node.name for node in nodes if node.own_kernel])
            try:
                return 1 if Demonstration(lab, begin).run() else 0
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
