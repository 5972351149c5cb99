# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Operations on the node under the load of :mod:`tests.kernel.test_migration_load`.

They run in the node's network namespace, or on the node's own kernel (:mod:`tests.lab.calls`), so arguments and
results must be JSON values.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any, Optional

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.archive import pack
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.restore import RollbackRequest, rollback
from tests.conformance.wirelab.cases import load_case
from tests.kernel.agent_node import AgentNode
from tests.lab import recorded, system
from tests.lab.system import run
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
CASE = load_case(str(ROOT / "tests" / "conformance" / "cases" / "nodeport-cluster"))
COUNTERS = re.compile(r"\[\d+:\d+\]")
IPVS_SYSCTLS = {"conntrack": 1, "expire_nodest_conn": 1, "expire_quiescent_template": 1}


def _saved_chains(variant: str) -> list[str]:
    return [run([f"{family}-{variant}-save"]) for family in ("iptables", "ip6tables")]


#: Programs, and kernel modules by pattern, that a node without iptables and ipset does not have.
PROGRAMS = re.compile(r"(?:ip6?tables|xtables|arptables|ebtables)(?:-.*)?|ipset|ipvsadm|nft")
KERNEL_MODULES = (
    "ip_set*",
    "ip_tables",
    "ip6_tables",
    "iptable_*",
    "ip6table_*",
    "x_tables",
    "xt_*",
    "ipt_*",
    "ip6t_*",
)
KERNEL_MODULES += ("nft_compat",)


class UpgradedAgent(AgentNode):
    """The agent run from an archive, as the role ``agent`` installs it."""

    def __init__(self, scratch: Path, mode: str) -> None:
        super().__init__(scratch, mode)
        for item in CASE.snapshots()[0]:
            self.store.put(item)
        addresses = {name: self.configuration[name] for name in ("healthzBindAddress", "metricsBindAddress")}
        self.configuration = {**CASE.proxy_configuration(mode, "", None), **addresses}
        self.write_configuration()

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, str(self.scratch / "kubenode-proxy.pyz"), *words]

    def install(self, stamp: str) -> None:
        """Install an archive in place of the current one; ``stamp`` makes its content differ."""
        content = pack(str(ROOT / "plugins" / "module_utils")).content
        fresh = self.scratch / "new.pyz"
        fresh.write_bytes(content)
        with zipfile.ZipFile(fresh, "a") as archive:
            archive.comment = stamp.encode()
        fresh.rename(self.scratch / "kubenode-proxy.pyz")


class LoadedNode:
    """The node of the conformance lab; its state is kept in ``scratch``."""

    def __init__(self, scratch: str) -> None:
        self._scratch = Path(scratch)
        self._scratch.mkdir(exist_ok=True)
        self._agent: Optional[UpgradedAgent] = None

    def load_recorded(self, mode: str, variant: str) -> None:
        """Program the state recorded from kube-proxy; ``nftables-1.38``: as that version would have."""
        mode, _dash, later = mode.partition("-")
        recorded.load(Path(CASE.file(f"state-{mode}.txt")), run, variant, later=bool(later))
        if mode == "ipvs":
            for name, value in IPVS_SYSCTLS.items():
                Path("/proc/sys/net/ipv4/vs", name).write_text(str(value), encoding="ascii")

    def converge(self, mode: str, filter_backend: str = "iptables") -> int:
        """Converge and return the number of the state that was saved before the change.

        ``filter_backend``: that of ipvs mode.
        """
        report = converge(
            Request(
                whole_cluster=False,
                cluster=ClusterState.from_objects(CASE.snapshots()[0]),
                configuration=load(
                    CASE.proxy_configuration(mode, "", None), node_source={"ipvsFilterBackend": filter_backend}
                ).configuration,
                node_name=CASE.node,
                mode=mode,
                state_directory=str(self._scratch / "state"),
                history_directory=str(self._scratch / "history"),
                keep_states=20,
            )
        )
        return report.saved_state or 0

    def roll_back(self, number: int) -> None:
        """Roll back to a saved state."""
        rollback(
            RollbackRequest(
                to=number,
                history_directory=str(self._scratch / "history"),
                keep=20,
                stop_units=False,
                state_directory=str(self._scratch / "state"),
            )
        )

    def programmed(self, mode: str, variant: str) -> list[str]:
        """Return the programmed state as the mode's own tools print it, without counters and sorted."""
        if mode == "nftables":
            return sorted(run(["nft", "-s", "list", "ruleset"]).splitlines())
        texts = _saved_chains(variant)
        if mode == "ipvs":
            texts += [run(["ipvsadm", "-Sn"]), run(["ipset", "save"])]
        lines = [COUNTERS.sub("", line) for text in texts for line in text.splitlines() if not line.startswith("#")]
        return sorted(re.sub(r" initval 0x\w+", "", line) for line in lines)

    def filter_backends(self) -> list[str]:
        """Return what the node has of each filter backend: ipsets, chains that match them, tables of nftables."""
        saved = [line for text in _saved_chains("nft") + _saved_chains("legacy") for line in text.splitlines()]
        found = {
            "ipsets": bool(run(["ipset", "list", "-n"])),
            "chains": any("--match-set KUBE-" in line or line.startswith(":KUBE-IPVS-") for line in saved),
            "tables": "kubenode-ipvs" in run(["nft", "list", "tables"]),
        }
        return [name for name, exists in found.items() if exists]

    @staticmethod
    def remove_iptables() -> None:
        """Remove the programs of iptables, ipset, IPVS and nft, and the modules of the first two, from a guest.

        Its root is an overlay in memory, and the directory of modules becomes one. Raises RuntimeError elsewhere.
        """
        if "tests.lab.node" not in Path("/proc/1/cmdline").read_text(encoding="utf-8"):
            raise RuntimeError("this is no guest: its programs are the host's")
        for directory in ("/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin"):
            for path in Path(directory).iterdir():
                if PROGRAMS.fullmatch(path.name):
                    path.unlink()
        release = os.uname().release
        place, layers = Path("/lib/modules", release), Path("/run/modules")
        for name in ("upper", "work"):
            (layers / name).mkdir(parents=True)
        system.mount(
            "overlay", str(place), "overlay", data=f"lowerdir={place},upperdir={layers}/upper,workdir={layers}/work"
        )
        for pattern in KERNEL_MODULES:
            for path in place.rglob(f"{pattern}.ko*"):
                path.unlink()
        run(["depmod", release])

    @staticmethod
    def kernel_modules() -> list[str]:
        """Return the names of the modules that are loaded."""
        return [line.split()[0] for line in Path("/proc/modules").read_text(encoding="ascii").splitlines()]

    def start_agent(self, mode: str, stamp: str) -> None:
        """Install an archive, start the agent from it, and return after its first sync."""
        if self._agent is None:
            self._agent = UpgradedAgent(self._scratch, mode)
        self._agent.install(stamp)
        self._agent.start()

    def boot_agent(self, disk: str) -> dict[str, Any]:
        """Start the agent in ipvs mode with the files of an earlier boot, if there are any; return its status.

        ``disk``: the directory that outlives the node. With an earlier boot's files there is no API server.
        """
        kept = Path(disk, "cache.gz")
        self._agent = UpgradedAgent(self._scratch, "ipvs")
        if kept.exists():
            self._agent.stop_api()
            shutil.copy(kept, self._scratch / kept.name)
        self._agent.install("")
        self._agent.start()
        written = self._scratch / kept.name
        # The agent writes it up to half a minute after the first sync.
        wait_for(written.exists, 120.0, 0.1)
        shutil.copy(written, kept)
        return self._agent.status()

    def stop_agent(self, number: int) -> None:
        """Stop the agent with a signal."""
        assert self._agent is not None
        self._agent.stop(number)

    def close(self) -> None:
        """Stop all processes that still run."""
        if self._agent is not None:
            self._agent.close()
