# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One container with systemd, and Ansible runs of the collection's roles on it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from tests.lab.ansible_playbook import COMPILED, SITE, ansible_playbook
from tests.waiting import wait_for

from . import image

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ROOT = Path(__file__).resolve().parents[2]


class Recap(NamedTuple):
    """The result of a playbook run on a node: the number of changed and failed tasks, and all output."""

    changed: int
    failed: int
    output: str
    changed_tasks: list[str]


_OWNER = "kubenode-proxy-tests"


def remove_left_over() -> None:
    """Remove containers of test runs that were killed before they could."""
    shown = "{{.ID}} {{.Labels}}".replace(".Labels", f'index .Labels "{_OWNER}"')
    listing = image.podman("ps", "--all", "--filter", f"label={_OWNER}", "--format", shown, check=False).stdout
    for identity, owner in (line.split() for line in listing.splitlines()):
        if not os.path.exists(f"/proc/{owner}"):
            image.podman("rm", "--force", "--ignore", "--time", "1", identity, check=False)


def enter(pid: int) -> list[str]:
    """Return the prefix of a command line that enters the container of a process; podman exec takes a second."""
    return ["nsenter", f"--target={pid}", "--all", "--wdns=/", "env", "-i", "HOME=/root", f"PATH={_PATH}"]


class Node:
    """A container with a release of Debian.

    ``network`` is podman's; with ``none`` it has no network. With ``project`` it sees the project, read-only.
    ``packages`` are installed in addition; ``more`` are options for podman.
    """

    def __init__(
        self,
        name: str,
        scratch: Path,
        network: str = "podman",
        release: str = "12",
        *,
        project: bool = False,
        packages: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.scratch = scratch
        options = ["--privileged", "--systemd=always", "--stop-timeout=2", f"--network={network}", f"--hostname={name}"]
        options.append(f"--label={_OWNER}={os.getpid()}")
        # The connection plugin has the node's Python keep compiled code there.
        COMPILED.mkdir(parents=True, exist_ok=True)
        options += [f"--volume={SITE}:/opt/compiled/site:ro", f"--volume={COMPILED}:/opt/compiled/code"]
        if project:
            options.append(f"--volume={ROOT}:{ROOT}:ro")
        image.podman("run", "--detach", "--name", name, *options, *more, image.image(release, packages))
        self.wait_until_booted()

    def wait_until_booted(self) -> None:
        """Wait until systemd has no pending start jobs."""
        self.pid = int(image.podman("inspect", "--format", "{{.State.Pid}}", self.name).stdout)
        wait_for(self._booted, 120, what=f"{self.name} has booted")

    def _booted(self) -> bool:
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() in ("running", "degraded")

    def close(self) -> None:
        """Kill and remove the container."""
        image.remove(self.name)

    def restart(self) -> None:
        """Stop and start the container: a boot with the same disk and an empty kernel state."""
        image.stop(self.name)
        image.podman("start", self.name)
        self.wait_until_booted()

    def reboot(self) -> None:
        """Have systemd reboot, and start the container that this ends.

        The units are stopped and started in their order; disk and journal stay, /run, network and rules do not. The
        kernel stays as well: boot identity and monotonic clock are those of before.
        """
        self.run("systemctl", "reboot", check=False)
        wait_for(lambda: not os.path.exists(f"/proc/{self.pid}/ns"), 60, what=f"{self.name} has stopped")
        image.podman("start", self.name)
        self.wait_until_booted()

    def run(self, *command: str, check: bool = True, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program in the container, with ``text`` as its standard input."""
        argv = [*enter(self.pid), *command]
        done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
        if check and done.returncode:
            words = f"{' '.join(command)}: status {done.returncode}: {done.stdout}{done.stderr}"
            raise AssertionError(words + self.journal())
        return done

    def copy(self, source: Path, target: str) -> None:
        """Copy a file into the container, readable for all users."""
        command = [*enter(self.pid), "sh", "-c", 'umask 022; cat >"$1"', "sh", target]
        subprocess.run(command, input=source.read_bytes(), check=True)

    def output(self, *command: str, text: str = "") -> str:
        """Return the output of a program."""
        return self.run(*command, text=text).stdout

    def begin(self, *command: str) -> subprocess.Popen[str]:
        """Start a program in the container, with pipes for its input and output."""
        pipe = subprocess.PIPE
        return subprocess.Popen([*enter(self.pid), *command], stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def write(self, target: str, text: str) -> None:
        """Write a file in the container."""
        self.run("sh", "-c", 'umask 022; mkdir -p "${1%/*}"; cat >"$1"', "sh", target, text=text)

    # Everything except kernel messages, which belong to the whole machine.
    _SOURCES = ("_TRANSPORT=journal", "+", "_TRANSPORT=stdout", "+", "_TRANSPORT=syslog")

    def journal(self) -> str:
        """Return the last lines of the journal."""
        return self.run("journalctl", "--no-pager", "-n", "30", *self._SOURCES, check=False).stdout

    def log(self, unit: str, *options: str) -> str:
        """Return what a systemd unit has logged. The journal stores lines late: those written so far are waited for."""
        self.run("journalctl", "--sync")
        return self.output("journalctl", "--no-pager", "-o", "cat", "-u", unit, *options)

    def unit(self, name: str, *properties: str) -> dict[str, str]:
        """Return properties of a systemd unit."""
        text = self.output("systemctl", "show", name, *(f"--property={word}" for word in properties))
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def role(self, name: str, variables: Mapping[str, Any], *options: str, failing: bool = False) -> Recap:
        """Apply a role of the collection. Fails if the run does, or, with ``failing``, if it does not."""
        return play(
            [self],
            [{"ansible.builtin.include_role": {"name": f"kubenode.proxy.{name}"}}],
            variables,
            *options,
            failing=failing,
        )[self.name]


@cache
def collection() -> Path:
    """Return a directory with a copy of the collection, so that edits during the tests have no effect."""
    top = Path(tempfile.mkdtemp(prefix="knp-collection-"))
    atexit.register(shutil.rmtree, top, ignore_errors=True)
    target = top / "ansible_collections/kubenode/proxy"
    for part in ("plugins", "roles", "playbooks", "meta"):
        shutil.copytree(ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "galaxy.yml", target)
    return top


@contextlib.contextmanager
def later_version() -> Iterator[None]:
    """Make the engine another version within the block, for upgrades."""
    engine = collection() / "ansible_collections/kubenode/proxy/plugins/module_utils"
    kept = engine.with_name("module_utils.kept")
    shutil.copytree(engine, kept)
    try:
        with (engine / "agent/__init__.py").open("a", encoding="utf-8") as file:
            file.write("# A version later.\n")
        yield
    finally:
        shutil.rmtree(engine)
        kept.rename(engine)


def play(
    nodes: Sequence[Node],
    tasks: list[dict[str, Any]],
    variables: Mapping[str, Any],
    *options: str,
    failing: bool = False,
) -> dict[str, Recap]:
    """Run tasks on the nodes in one play and return the recap of each."""
    playbook = nodes[0].scratch / "playbook.yml"
    playbook.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]), encoding="utf-8")
    return run_playbook(nodes, str(playbook), variables, {}, *options, failing=failing)


def run_playbook(
    nodes: Sequence[Node],
    playbook: str,
    variables: Mapping[str, Any],
    of_hosts: Mapping[str, Mapping[str, Any]],
    *options: str,
    failing: bool = False,
    enter: Sequence[str] = (),
) -> dict[str, Recap]:
    """Run a playbook, a file or one of the collection by its full name, and return the recap of each node.

    ``variables`` apply to all hosts; ``of_hosts`` adds others by the node's name. ``enter`` is the beginning of a
    command line that runs Ansible elsewhere, in a network namespace for example. Fails if the run does, or, with
    ``failing``, if it does not.
    """
    run = begin_playbook(nodes, playbook, variables, of_hosts, *options, enter=enter)
    output, errors = run.communicate()
    if bool(run.returncode) is not failing:
        raise AssertionError(f"status {run.returncode}: {output[-3000:]}{errors[-2000:]}{nodes[0].journal()}")
    return {node.name: recap(node.name, output) for node in nodes}


def begin_playbook(
    nodes: Sequence[Node],
    playbook: str,
    variables: Mapping[str, Any],
    of_hosts: Mapping[str, Mapping[str, Any]],
    *options: str,
    enter: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start a playbook in a session of its own, with pipes for its output; see :func:`run_playbook`."""
    scratch = Path(tempfile.mkdtemp(dir=nodes[0].scratch))
    hosts = {
        node.name: {"ansible_connection": "container", "ansible_host": str(node.pid), **of_hosts.get(node.name, {})}
        for node in nodes
    }
    # Root needs no sudo. Where a test sets ansible_user, the playbooks' own become counts.
    access = {} if "ansible_user" in variables else {"ansible_user": "root", "ansible_become": False}
    everywhere = {"ansible_python_interpreter": "/usr/bin/python3", **access, **variables}
    inventory = scratch / "hosts.json"
    inventory.write_text(json.dumps({"k8s_cluster": {"hosts": hosts, "vars": everywhere}}), encoding="utf-8")
    environment = {
        **image.environment(),
        "ANSIBLE_COLLECTIONS_PATH": str(collection()),
        "ANSIBLE_CONNECTION_PLUGINS": str(Path(__file__).parent / "connection"),
        "ANSIBLE_HOME": str(nodes[0].scratch / "ansible"),
        "ANSIBLE_LOCAL_TEMP": str(scratch / "local"),
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_NO_TARGET_SYSLOG": "1",
        "ANSIBLE_LOCALHOST_WARNING": "0",
        "ANSIBLE_DISPLAY_OK_HOSTS": "0",
        "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [*enter, *ansible_playbook(), "-i", str(inventory), "--diff", *options, playbook]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=nodes[0].scratch,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def recap(name: str, output: str) -> Recap:
    """Return the recap of a node in the output of a playbook."""
    line = next(line for line in output.rsplit("PLAY RECAP", 1)[1].splitlines() if line.startswith(f"{name} "))
    counts = dict(word.split("=") for word in line.split(" : ", 1)[1].split())
    changed, task = [], ""
    for text in output.splitlines():
        if text.startswith(("TASK [", "RUNNING HANDLER [")):
            task = text.split("[", 1)[1].rsplit("]", 1)[0]
        elif text.startswith(f"changed: [{name}"):
            changed.append(task)
    return Recap(int(counts["changed"]), int(counts["failed"]), output, changed)
