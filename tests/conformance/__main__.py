# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the suites of the wire lab where each belongs: ``python -m tests.conformance [--full] PLACE``.

Places: ``here``, ``uml`` (user-mode Linux, which has IPVS) and ``debian`` (Debian's kernels, emulated by QEMU). A case
lists its suites in its case.yaml. The first run that fails ends the program, with that run's exit status.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping, Sequence

HOME = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Run:
    """One call of the lab, with the words of its command line.

    ``suite`` names the cases. With ``--full``, a run that ``grows`` has all cases instead. A run that is ``only_full``
    is skipped without it.
    """

    suite: str
    options: str
    guest: str = ""
    grows: bool = True
    only_full: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def words(self, full: bool) -> list[str]:
        """Return the command line."""
        cases = [] if full and self.grows else self.cases()
        guest = [*self.guest.split(), "--"] if self.guest else []
        return [str(HOME / "lab"), *guest, "run", *self.options.split(), *cases]

    def cases(self) -> list[str]:
        """Return the options that choose the cases of the suite."""
        return ["--suite", self.suite]


class Corrected(Run):
    """A run of the cases in which corrected behaviour differs in ipvs mode."""

    def cases(self) -> list[str]:
        """Return the options that choose the cases with a file of corrections."""
        found = sorted(path.parent.name for path in HOME.glob("cases*/*/corrected-ipvs.json"))
        return [word for name in found for word in ("--cases", name)]


NFT = "--mode iptables --iptables nft --jobs 6"
NFTABLES = "--mode nftables --jobs 6"
# One case at a time in each guest: a kernel's list of one namespace's virtual servers is affected by other namespaces.
IPVS = "--mode ipvs --jobs 1"
DEBIAN_12 = "qemu --timeout 7200 --jobs 2"
DEBIAN_13 = "qemu --debian 13 --jobs 2"
FILTER_IPTABLES = {"LAB_IPVS_FILTER_BACKEND": "iptables"}
FILTER_NFTABLES = {"LAB_IPVS_FILTER_BACKEND": "nftables"}

RUNS: dict[str, Sequence[Run]] = {
    "here": (
        Run("areas", NFT),
        Run("twins", f"{NFT} --families dual"),
        Run("legacy", "--mode iptables --iptables legacy --jobs 6"),
        Run("areas", NFTABLES),
        Run("twins", f"{NFTABLES} --families ipv6"),
        # The cases that apply to this mode, compared with the recordings of ipvs mode.
        Run("userspace", "--mode userspace --agent --any-source --loose --jobs 6", grows=False),
        Run("twins", f"{NFT} --families ipv6", only_full=True),
        Run("twins", f"{NFTABLES} --families dual", only_full=True),
    ),
    "uml": (
        Run("ipvs", IPVS, "uml --timeout 7200 --jobs 2"),
        Run("ipvs-twins", f"{IPVS} --families ipv6", "uml --jobs 2"),
    ),
    # A case takes half a minute there. User-mode Linux runs all cases of ipvs mode, with legacy iptables.
    "debian": (
        Run("debian-ipvs", IPVS, DEBIAN_12, grows=False, environment=FILTER_IPTABLES),
        Run("filter-backend", IPVS, DEBIAN_12, environment=FILTER_NFTABLES),
        Corrected(
            "corrected",
            IPVS,
            DEBIAN_12,
            grows=False,
            only_full=True,
            environment={**FILTER_NFTABLES, "LAB_BEHAVIOUR": "corrected"},
        ),
        Run("debian-13", "--mode nftables --jobs 1", DEBIAN_13, grows=False),
        Run("debian-13", "--mode iptables --jobs 1", DEBIAN_13, grows=False),
        Run("debian-13", IPVS, DEBIAN_13, grows=False, environment=FILTER_IPTABLES),
    ),
}


def main() -> int:
    """Run the lab for each run of the place; return the exit status of the first that fails, or 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description="suites of the wire lab")
    parser.add_argument("place", choices=RUNS)
    parser.add_argument("--full", action="store_true", help="all cases, and all runs")
    arguments = parser.parse_args()
    for run in RUNS[arguments.place]:
        if run.only_full and not arguments.full:
            continue
        words = run.words(arguments.full)
        print("==", *(f"{name}={value}" for name, value in run.environment.items()), *words[1:], flush=True)
        status = subprocess.run(words, env={**os.environ, **run.environment}, check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
