# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The runner: the command that starts the proxy in the network namespace of the node under test."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

import yaml

from .cases import Case
from .objects import Object
from .options import RunnerOptions

STOP_SECONDS = 15
LOG_LINES_SHOWN = 15
_IPTABLES_PROGRAMS = tuple(
    f"{family}{suffix}" for family in ("iptables", "ip6tables") for suffix in ("", "-save", "-restore")
)
_SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/usr/local/sbin"


class RunnerFailed(RuntimeError):
    """The proxy failed, or did not finish a step in time."""


class Runner:
    """One runner for one case: its scratch folder, its environment, its process."""

    def __init__(self, case: Case, options: RunnerOptions, node_namespace: str, server: str, instance: str) -> None:
        self._case = case
        self._options = options
        self._node_namespace = node_namespace
        self.directory = tempfile.mkdtemp(prefix=f"kplab-{instance}-")
        self._files = {
            name: os.path.join(self.directory, file)
            for name, file in (("kubeconfig", "kubeconfig"), ("snapshot", "snapshot.json"), ("config", "config.yaml"))
        }
        self.log_file = os.path.join(self.directory, "proxy.log")
        self._daemon: subprocess.Popen[bytes] | None = None
        self._environment = self._make_environment()
        self._write_kubeconfig(server)

    # what the runner is given

    def write_snapshot(self, items: Sequence[Object]) -> None:
        """Replace the snapshot file by renaming, so that a reader sees the old or the new one whole."""
        path = self._files["snapshot"]
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump({"apiVersion": "v1", "kind": "List", "items": list(items)}, file, indent=1)
        os.rename(path + ".tmp", path)

    def write_configuration(self, changes: dict[str, Any] | None, node_changes: dict[str, Any] | None) -> None:
        """Write the KubeProxyConfiguration of the case, and its NodeProxyConfiguration if it needs one, with the
        changes that its steps made so far.
        """
        documents = [self._case.proxy_configuration(self._options.mode, self._files["kubeconfig"], changes)]
        second = self._case.node_configuration(self._options.behaviour, node_changes, self._options.ipvs_filter_backend)
        with open(self._files["config"], "w", encoding="utf-8") as file:
            yaml.safe_dump_all([*documents, second] if second else documents, file)

    def _write_kubeconfig(self, server: str) -> None:
        cluster: dict[str, Any] = {"server": server}
        if server.startswith("https:"):
            cluster["insecure-skip-tls-verify"] = True
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": "lab", "user": {"token": "lab"}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
        }
        with open(self._files["kubeconfig"], "w", encoding="utf-8") as file:
            yaml.safe_dump(content, file)

    def _placeholders(self) -> dict[str, str]:
        return {
            **self._files,
            "node": self._case.node,
            "mode": self._options.mode,
            "dir": self.directory,
            "case": self._case.name,
        }

    def _make_environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment.update({"LAB_" + name.upper(): value for name, value in self._placeholders().items()})
        before_path = []
        if self._options.single_stack and tuple(self._case.families) == (4,):
            before_path.append(
                self._programs("no-ipv6", {name: "/bin/false" for name in _IPTABLES_PROGRAMS if name.startswith("ip6")})
            )
        if self._options.iptables != "system":
            before_path.append(self._programs("variant", iptables_variant(self._options.iptables)))
        environment["PATH"] = ":".join([*before_path, environment.get("PATH", _SYSTEM_PATH)])
        # With one lock for the whole machine, labs that run at once would wait for each other.
        environment["XTABLES_LOCKFILE"] = os.path.join(self.directory, "xtables.lock")
        return environment

    def _programs(self, name: str, programs: dict[str, str]) -> str:
        """Create a directory for PATH with links to programs, and return it."""
        directory = os.path.join(self.directory, name)
        os.mkdir(directory)
        for program, target in programs.items():
            os.symlink(target, os.path.join(directory, program))
        return directory

    # running it

    def start(self) -> None:
        """Start the proxy as a daemon, unless it runs."""
        if self._daemon:
            return
        with open(self.log_file, "ab") as log:
            self._daemon = subprocess.Popen(
                self._in_node(self._command(self._options.command)),
                env=self._environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def stop(self, with_signal: int = signal.SIGTERM) -> None:
        """Stop the daemon if it runs; killed if it does not end in time."""
        if not self._daemon:
            return
        self._daemon.send_signal(with_signal)
        try:
            self._daemon.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()
        self._daemon = None

    def check_alive(self) -> None:
        """Raise RunnerFailed if the daemon has ended by itself."""
        if self._daemon and self._daemon.poll() is not None:
            raise RunnerFailed(f"the proxy exited with {self._daemon.returncode}")

    async def converge(self) -> None:
        """Run the command once. RunnerFailed if it does not exit with 0."""
        status = await self._run_logged(self._options.command)
        if status:
            raise RunnerFailed(f"the runner exited with {status}")

    async def clean_up(self) -> None:
        """Run the clean-up command, if there is one. RunnerFailed if it does not exit with 0."""
        if not self._options.cleanup:
            return
        status = await self._run_logged(self._options.cleanup)
        if status:
            raise RunnerFailed(f"the clean-up exited with {status}")

    async def shell(self, command: str) -> tuple[int, str]:
        """Run a shell command in the node's namespace: exit status and output."""
        process = await asyncio.create_subprocess_exec(
            *self._in_node(["sh", "-c", command]),
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    def output_of(self, command: str) -> str:
        """Return the output of a command in the node's namespace, empty if it cannot be run."""
        done = subprocess.run(
            self._in_node(shlex.split(command)), env=self._environment, capture_output=True, text=True, check=False
        )
        return done.stdout

    def log_tail(self) -> list[str]:
        """Return the last lines that the proxy wrote."""
        if not os.path.exists(self.log_file):
            return []
        with open(self.log_file, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()[-LOG_LINES_SHOWN:]

    def remove(self, keep_logs: str | None = None) -> None:
        """Remove the scratch folder; the log goes to *keep_logs*."""
        if keep_logs and os.path.exists(self.log_file):
            os.makedirs(keep_logs, exist_ok=True)
            shutil.copy(self.log_file, os.path.join(keep_logs, f"{self._case.name}-{self._options.mode}.log"))
        shutil.rmtree(self.directory, ignore_errors=True)

    async def _run_logged(self, template: str) -> int:
        with open(self.log_file, "ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._in_node(self._command(template)), env=self._environment, stdout=log, stderr=log
            )
            return await process.wait()

    def _command(self, template: str) -> list[str]:
        placeholders = self._placeholders()
        return [word.format(**placeholders) for word in shlex.split(template)]

    def _in_node(self, command: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self._node_namespace, *command]


def iptables_variant(kind: str) -> dict[str, str]:
    """Program -> the program of that variant (``nft`` or ``legacy``). FileNotFoundError without iptables of it."""
    found = {}
    for name in _IPTABLES_PROGRAMS:
        family, _, suffix = name.partition("-")
        target = shutil.which("-".join(filter(None, (family, kind, suffix))), path=_SYSTEM_PATH)
        if target:
            found[name] = target
    if "iptables-restore" not in found:
        raise FileNotFoundError(f"no iptables-{kind}-restore on {_SYSTEM_PATH}")
    return found
