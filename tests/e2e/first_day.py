# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An operator's first day: the commands of the documentation, as they are printed, on a cluster that kube-proxy serves.

kube-proxy is a DaemonSet with kubeadm's ConfigMap. The nodes are reached over ssh as an ordinary user with sudo, and
the inventory is the cluster's own Nodes. About 100 requests a second are sent meanwhile; each step counts those that
got no answer. Connections that are opened before the first step are used until the last one.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

from tests.documentation.commands import blocks, command_blocks, installation_of_ansible, inventory_of_readme
from tests.documentation.shell import Shell, copy_clone
from tests.lab.load import Load
from tests.lab.namespaces import ROOT
from tests.lab.node import USER
from tests.lab.ssh import make_keys
from tests.lab.system import LabError

from .addresses import node_addresses
from .cluster import Cluster
from .images import image_of
from .proxies import configuration, kubeadm_objects
from .workload import Workload

README, MODES, ROLLBACK = "README.md", "docs/modes.md", "docs/rollback.md"
_ROLLBACK = "# to the state before the last convergence"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_IMAGE = "distroless-iptables"


class Step(NamedTuple):
    """A command of a page: the line of its blocks of commands that has these words.

    ``sets`` are variables that the operator writes into the inventory before. The command must print ``says``, and must
    fail if ``fails``. ``lossless``: whether a lost request is a failure; a connection that was kept must never be lost.
    ``moving``: see :meth:`Workload.load`. ``adds`` is written at the end of the command. ``then`` are the words of a
    further command of the page; the last one is typed after ``waits`` seconds. ``reuses``: the clients begin at once
    with the source ports of the step before.
    """

    name: str
    page: str
    words: str
    sets: Mapping[str, Any] = {}
    says: str = ""
    fails: bool = False
    lossless: bool = True
    moving: bool = False
    adds: str = ""
    waits: int = 0
    then: str = ""
    reuses: bool = False


#: What README and docs/migration.md say of kube-proxy's configuration, done.
_SAME = {"service_proxy_configuration": {k: configuration("")[k] for k in ("clusterCIDR", "conntrack")}}
STEPS = (
    Step("name the cluster", README, "export KUBECONFIG"),
    Step(
        "preview, not configured",
        README,
        "migrate -e agent_create_access=true --check",
        says="clusterCIDR: kube-proxy has",
        fails=True,
    ),
    Step("preview", README, "migrate -e agent_create_access=true --check", _SAME),
    Step("migrate one", README, "# one node"),
    Step("migrate all", README, "# all of them"),
    Step("verify", README, "# any drift?"),
    Step("explain", "docs/node-command.md", "kubenode.proxy.explain"),
    Step("mode change, preview", MODES, "--check --diff", {"service_proxy_mode": "nftables"}),
    Step("mode change", MODES, "# change"),
    Step("verify the mode", README, "# any drift?"),
    Step("rollback, preview", ROLLBACK, "# what it would change"),
    Step("rollback", ROLLBACK, _ROLLBACK),
    Step("start the agent again", ROLLBACK, "systemctl start"),
    Step("drain", "docs/drain.md", "kubenode.proxy.drain -e drain_tasks=reboot.yml", moving=True),
    # The drain has moved all pods.
    Step("rollback to pods that are gone", ROLLBACK, _ROLLBACK, says="do not exist any more", fails=True),
    Step(
        "the same, and the agent",
        ROLLBACK,
        _ROLLBACK,
        adds=" -e rollback_accept_loss=true",
        waits=10,
        then="systemctl start",
        lossless=False,
    ),
    # A client that comes back with a port that it used while nothing answered.
    Step("verify after the rollback", README, "# any drift?", waits=30, reuses=True),
    Step("way back, a minute later", README, "# back", waits=30),
    Step("remove kube-proxy", "docs/distributions.md", "delete daemonset"),
    Step("converge, preview", README, "kubenode.proxy.converge --check --diff"),
    Step("converge", README, "# apply"),
    Step("verify the convergence", README, "# has anything drifted?"),
    Step("clean up", README, "# remove everything again", lossless=False),
)


class Row(NamedTuple):
    """How a step went: what was wrong (empty if nothing), seconds, requests and those that were lost."""

    name: str
    problem: str
    seconds: float
    requests: int
    lost: int


def command_of(page: str, words: str) -> str:
    """Return the only line of a page's commands with these words. Raises LabError."""
    lines = [line for block in command_blocks(ROOT / page) for line in block.text.splitlines()]
    found = [line for line in lines if words in line]
    if len(found) != 1:
        raise LabError(f"{page}: {len(found)} commands with {words!r}")
    return found[0]


def typed_in(step: Step, node: str) -> str:
    """Return what is typed in a step, with the name of a node where the pages have a placeholder."""
    first = command_of(step.page, step.words)
    commands = [f"{first.partition('  #')[0]}{step.adds}" if step.adds else first]
    if step.then:
        commands.append(command_of(step.page, step.then))
    if step.waits:
        commands.insert(-1, f"sleep {step.waits}")
    return "\n".join(commands).replace("NODE", node).replace("worker-1", node)


def judge(step: Step, status: int, printed: str, lost: Sequence[str], broken: Sequence[str] = ()) -> str:
    """Return what was wrong with a step.

    Given are its status, what it printed, the requests that were lost, and those over connections that were kept.
    """
    words = " ".join(printed.split())
    if bool(status) is not step.fails:
        return f"status {status}: {words[-600:]}"
    if step.says not in words:
        return f"does not say {step.says!r}"
    if broken:
        return f"lost {len(broken)} of connections that were kept: {broken[0]}"
    return f"lost {len(lost)}: {lost[0]}" if lost and step.lossless else ""


class Operator:
    """A user at a shell that reaches the cluster, with a clone, README's inventory and access to the nodes by ssh."""

    def __init__(self, cluster: Cluster, scratch: Path, log: Path) -> None:
        self._cluster = cluster
        self._log = log
        self._variables: dict[str, Any] = {}
        home, self._clone, programs = (scratch / name for name in ("home", "clone", "bin"))
        for directory in (home / ".kube", self._clone, programs, home / "keys"):
            directory.mkdir(parents=True)
        copy_clone(self._clone)
        make_keys(home / "keys", "10.89.0.*")
        for node in cluster.nodes:
            node.admit(home / "keys")
        (home / ".kube/config").write_bytes(cluster.control.kubeconfig("admin").read_bytes())
        (programs / "kubectl").symlink_to(cluster.binaries.path("kubectl"))
        # ssh looks for keys in the home directory of the account, not in $HOME.
        ssh = f"-o UserKnownHostsFile={home}/keys/known_hosts"
        self._variables.update({"ansible_user": USER, "ansible_ssh_private_key_file": f"{home}/keys/key"})
        self._variables["ansible_ssh_common_args"] = ssh
        for name in ("kubenode-proxy", "systemctl"):
            program = programs / name
            target = f"{USER}@{node_addresses(1)[0]}"
            program.write_text(f'#!/bin/sh\nexec ssh -i {home}/keys/key {ssh} {target} sudo {name} "$@"\n')
            program.chmod(0o755)
        (self._clone / "inventory/group_vars").mkdir(parents=True)
        (self._clone / "inventory/nodes.yml").write_text(inventory_of_readme(), encoding="utf-8")
        # A container that is rebooted loses its network.
        tasks = next(block.text for block in blocks(ROOT / "docs/drain.md") if block.text.startswith("# reboot.yml"))
        kept = [task for task in tasks.split("\n\n") if "ansible.builtin.reboot:" not in task]
        (self._clone / "reboot.yml").write_text("\n\n".join(kept) + "\n", encoding="utf-8")
        self._environment = {"HOME": str(home), "PATH": f"{programs}:{_PATH}", "LC_ALL": "C.UTF-8"}
        self._environment["TMPDIR"] = str(scratch)
        self._install()
        self.shell = Shell(self._clone, self._environment, cluster.control.namespaces.enter(self._clone))
        self._type(installation_of_ansible().split(" && ")[1])

    def _install(self) -> None:
        """Install Ansible and the collection, where the package registry is reached."""
        self.shell = Shell(self._clone, self._environment)
        try:
            for command in (installation_of_ansible(), command_of(README, "ansible-galaxy collection build")):
                self._type(command)
        finally:
            self.shell.close()

    def _type(self, command: str) -> None:
        status, printed = self.shell.type(command)
        if status:
            raise LabError(f"{command}: status {status}: {printed}")

    def take(self, step: Step, workload: Workload, kept: Load) -> Row:
        """Run the commands of a step under load."""
        self._variables.update(step.sets)
        path = self._clone / "inventory/group_vars/k8s_cluster.yml"
        path.write_text(json.dumps(self._variables), encoding="utf-8")
        text = typed_in(step, self._cluster.nodes[0].name)
        with workload.load(moving=step.moving, settling=not step.reuses) as load:
            started = time.monotonic()
            status, printed = self.shell.type(text)
            seconds = time.monotonic() - started
            during, after = load.take(), load.rest()
        over_kept = kept.take()
        lost = [*during.problems, *after.problems]
        broken = over_kept.problems
        with self._log.open("a", encoding="utf-8") as log:
            lines = [f"== {step.name}", f"$ {text}", printed, f"status {status}", *lost, *broken]
            log.write("\n".join(lines) + "\n")
        problem = judge(step, status, printed, lost, broken)
        requests = sum(tally.requests for tally in (during, after, over_kept))
        return Row(step.name, problem, seconds, requests, len(lost) + len(broken))

    def close(self) -> None:
        """End the shell."""
        self.shell.close()


def run_first_day(cluster: Cluster, output: Path, steps: Sequence[Step] = STEPS) -> list[Row]:
    """Run the steps up to the first that fails. ``output`` gets what the commands print, and the lost requests."""
    image = image_of(_IMAGE, cluster.images)
    log = output / "commands.log"
    log.unlink(missing_ok=True)
    rows: list[Row] = []
    with contextlib.ExitStack() as closing:
        # The path of an ssh control socket must be short.
        scratch = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix=f"fd{os.getpid()}")))
        cluster.control.create(kubeadm_objects("iptables", image))
        cluster.control.kubectl(
            "rollout", "status", "daemonset/kube-proxy", "--namespace=kube-system", "--timeout=300s"
        )
        workload = Workload(cluster.control, cluster.nodes, image)
        closing.callback(workload.close)
        operator = Operator(cluster, scratch, log)
        closing.callback(operator.close)
        kept = closing.enter_context(workload.keep())
        for step in steps:
            row = operator.take(step, workload, kept)
            rows.append(row)
            print(
                f"== {row.name}: {row.seconds:.0f} s, {row.requests} requests, {row.lost} lost {row.problem}",
                flush=True,
            )
            if row.problem:
                break
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table with one row for each step."""
    lines = ["| step | seconds | requests | lost |", "|---|---|---|---|"]
    return lines + [f"| {row.name} | {row.seconds:.0f} | {row.requests} | {row.lost} |" for row in rows]
