# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The suite: which specs are run, and one run of them."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Mapping, NamedTuple

from tests.lab.system import LabError

from .binaries import Binaries
from .control_plane import ControlPlane

#: After which time a run is ended, with the specs that have run so far in its report.
_HOURS = 3


class Selection(NamedTuple):
    """Specs to run: those whose names match ``focus``, without those that match one of ``skip`` (with the reason)."""

    focus: str
    skip: Mapping[str, str]


_NO_SCTP = {r"SCTP|sctp": "the kernel has no SCTP sockets"}
#: What concerns the program that serves Services.
SERVICES = Selection(
    r"\[sig-network\] (Services|Conntrack|Networking|EndpointSlice|Endpoint|HostPort|Proxy|Connectivity|KubeProxy"
    r"|Service CIDRs|ServiceCIDR|Service endpoints|NoSNAT|Topology|Traffic|\[Feature:IPv6DualStack\])",
    {
        r"LoadBalancer": "needs a cloud's load balancers",
        r"IPerf": "measures the machine",
        r"should be rejected for evicted pods": "needs a disk that pods can fill",
        r"\[Feature:Networking-(IPv4|IPv6|DNS)\]": "needs a way to the internet",
    },
)
NETWORK_POLICIES = Selection(r"\[sig-network\] Netpol", {})


def on_this_kernel(selection: Selection) -> Selection:
    """Return the selection without what this machine's kernel cannot do."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_SCTP):
            return selection
    except OSError:
        return Selection(selection.focus, {**selection.skip, **_NO_SCTP})


def run_suite(binaries: Binaries, control: ControlPlane, output: Path, selection: Selection, processes: int) -> Path:
    """Run the specs, some at a time, and return the report. Raises LabError if there is none.

    ``output`` gets the report and what the suite prints.
    """
    report = output / "report.json"
    report.unlink(missing_ok=True)
    command = [
        binaries.path("ginkgo"),
        f"--procs={processes}",
        f"--focus={selection.focus}",
        "--no-color",
        f"--timeout={_HOURS}h",
    ]
    command += [f"--skip={pattern}" for pattern in selection.skip]
    command += ["--silence-skips", f"--json-report={report.name}", f"--output-dir={output}"]
    command += [binaries.path("e2e.test"), "--", f"--kubeconfig={control.kubeconfig('admin')}", "--provider=skeleton"]
    command += ["--num-nodes=2", f"--kubectl-path={binaries.path('kubectl')}", "--disable-log-dump"]
    with open(output / "suite.log", "wb") as log:
        subprocess.run(
            [*control.enter(), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "KUBECONFIG": str(control.kubeconfig("admin"))},
            check=False,
        )
    if not report.exists():
        raise LabError(f"the suite ended without a report; see {output / 'suite.log'}")
    return report
