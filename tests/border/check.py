# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Feed all hostile texts to real versions of ansible-core, on every way that the collection has for them.

    python -m tests.border.check [--rulebook PYTHON] BIN...

BIN: directories with the programs of an ansible-core. PYTHON: the interpreter of an environment with ansible-rulebook,
whose own functions render the texts of Events; without it, jinja2 does as they do. A text that is evaluated makes a
file. The same texts unprotected show that the check can fail.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from plugins.module_utils.controller.border import harmless
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.border.forms import ACTION, HARMLESS, LITERALS, RARE, TEMPLATES, VALUES
from tests.conftest import ROOT
from tests.lab.manifests import node

ALL = {**TEMPLATES, **RARE, **LITERALS}
PLAYBOOK = Path(__file__).with_name("play.yml")


def armed(name: str, text: str, traces: Path) -> str:
    """Return a text whose evaluation makes a file with the name."""
    trace = traces / re.sub("[^a-z0-9]", "_", name)
    return text.replace(ACTION, f'lookup("pipe", "touch {trace}")')


class Lab:
    """A directory with all inputs, and the test API server with a Node for each text."""

    def __init__(self, directory: Path, python: str) -> None:
        self.directory = directory
        self.traces = directory / "traces"
        self.traces.mkdir()
        store = Store()
        self.names = {f"n{number}": name for number, name in enumerate(ALL)}
        self.texts: dict[str, str] = {}
        for host, name in self.names.items():
            self.texts[host] = armed(f"node {name}", ALL[name], self.traces)
            # Two variables that are a template when they are put together.
            info = {"osImage": self.texts[host], "kernelVersion": "{", "kubeletVersion": '{ lookup("pipe", "id") }}'}
            taints = [{"key": self.texts[host], "value": self.texts[host], "effect": "NoSchedule"}]
            store.put(node(host, "192.0.2.1", "10.1.0.0/24", spec={"taints": taints}, status={"nodeInfo": info}))
        self.api = ApiServer(store, None)
        inventory = directory / "inventory"
        inventory.mkdir()
        (inventory / "zz.nodes.yml").write_text(yaml.safe_dump(self._nodes()), encoding="utf-8")
        (directory / "answers.json").write_text(
            json.dumps({name: armed(f"answer {name}", text, self.traces) for name, text in ALL.items()}),
            encoding="utf-8",
        )
        self._events(python)
        self._python()
        self._node_commands()

    def _nodes(self) -> dict[str, Any]:
        """Return the configuration of the inventory plugin: variables and groups made of the texts."""
        info = "kubernetes_node_info"
        return {
            "plugin": "kubenode.proxy.nodes",
            "host": self.api.url,
            "compose": {
                "copied": f"{info}.osImage",
                "joined": f"{info}.kernelVersion ~ {info}.kubeletVersion",
                "changed": f"{info}.osImage | replace('~', '') | trim",
                "ansible_connection": "'local'",
            },
            "keyed_groups": [{"prefix": "os", "key": f"{info}.osImage"}],
            "groups": {"composed": f"{info}.osImage is defined and 'ACTION' not in {info}.osImage"},
        }

    def _events(self, python: str) -> None:
        """Write what ansible-rulebook would write: playbooks for actions, and extra variables."""
        crossing = {name: harmless(armed(f"event {name}", text, self.traces)) for name, text in ALL.items()}
        control = {
            name: armed(f"control {name}", text, self.traces) for name, text in {**TEMPLATES, **LITERALS}.items()
        }
        given = {"events": crossing, "control": control, "values": VALUES}
        argv = [python, str(Path(__file__).with_name("rendering.py"))]
        done = subprocess.run(argv, input=json.dumps(given), capture_output=True, text=True, check=True)
        for name, tasks in yaml.unsafe_load(done.stdout).items():
            (self.directory / f"{name}.yml").write_text(yaml.dump(tasks), encoding="utf-8")
        event = {
            "event": {"agent_event": {"notes": list(crossing.values()), "harmless": list(map(harmless, HARMLESS))}}
        }
        (self.directory / "extra.yml").write_text(yaml.dump({"ansible_eda": event}), encoding="utf-8")

    def _python(self) -> None:
        """Write a program that answers as the Python of a hostile node."""
        text = armed("wheelhouse", "{{ ACTION }}", self.traces)
        program = self.directory / "python"
        answer = json.dumps({"version": text, "machine": text, "missing": []})
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n", encoding="utf-8")
        program.chmod(0o755)

    def _node_commands(self) -> None:
        """Write node commands that answer ``explain`` with all texts, and with one that looks like a list."""
        self.verdicts = [
            "forwarded",
            "[1, 2]",
            "; ".join(armed(f"explain {name}", ALL[name], self.traces) for name in ALL),
        ]
        hosts = {}
        for number, verdict in enumerate(self.verdicts):
            flow = {
                "verdict": verdict,
                "reason": "",
                "service": "",
                "endpoint": "",
                "endpoints": [],
                "masqueraded": False,
            }
            answer = json.dumps({"flows": [flow], "allowed": True, "differences": []})
            program = self.directory / f"explain{number}"
            program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n", encoding="utf-8")
            program.chmod(0o755)
            hosts[f"host{number}"] = {"explain_command": str(program)}
        everywhere = {"ansible_connection": "local", "ansible_become": False}
        (self.directory / "explain.json").write_text(
            json.dumps({"k8s_cluster": {"vars": everywhere, "hosts": hosts}}), encoding="utf-8"
        )

    def run(self, binaries: Path) -> list[str]:
        """Run the plays with one version of ansible-core; return what is wrong."""
        for trace in self.traces.iterdir():
            trace.unlink()
        environment = {
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_HOME": str(self.directory / "home"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
        }
        program = str(binaries / "ansible-playbook")
        flow = ["-e", "explain_from=198.51.100.7", "-e", "explain_to=10.96.0.7:80"]
        argv = [program, "-i", str(self.directory / "explain.json"), *flow, "kubenode.proxy.explain"]
        explained = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=self.directory)
        argv = [program, "-i", str(self.directory / "inventory"), str(PLAYBOOK)]
        argv += ["-e", f"@{self.directory / 'extra.yml'}", "-e", f"place={self.directory}"]
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=self.directory)
        traces = {path.name for path in self.traces.iterdir()}
        wrong = [f"evaluated: {name}" for name in sorted(traces) if not name.startswith("control")]
        if explained.stdout.count(" (1 of 3): ") != len(self.verdicts) or " (1 of 3): [1, 2]" not in explained.stdout:
            wrong.append(f"explain does not show all answers: {explained.stdout[-3000:]}{explained.stderr[-3000:]}")
        if done.returncode != 0:
            return [*wrong, f"ansible-playbook ends with {done.returncode}: {done.stdout[-3000:]}{done.stderr[-3000:]}"]
        expected = {re.sub("[^a-z0-9]", "_", f"control {name}") for name in {**TEMPLATES, **LITERALS}}
        wrong += [f"the check is void, not evaluated: {name}" for name in sorted(expected - traces)]
        return wrong + self._changed(json.loads((self.directory / "seen.json").read_text(encoding="utf-8")))

    def _changed(self, seen: dict[str, Any]) -> list[str]:
        """Return which texts did not arrive as they were sent."""
        wrong = [
            f"{name} arrived as {seen['copied'].get(host)!r}"
            for host, name in self.names.items()
            if seen["copied"].get(host) != self.texts[host]
        ]
        wrong += [f"two variables arrived as {text!r}" for text in set(seen["joined"].values()) if "lookup" not in text]
        return wrong + [
            f"{text!r} arrived as {found!r}" for text, found in zip(HARMLESS, seen["harmless"]) if text != found
        ]


def main() -> int:
    """Check each version; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rulebook", default=sys.executable)
    parser.add_argument("binaries", nargs="+", type=Path)
    arguments = parser.parse_args()
    status = 0
    with tempfile.TemporaryDirectory() as directory:
        lab = Lab(Path(directory), arguments.rulebook)
        try:
            for binaries in arguments.binaries:
                wrong = lab.run(binaries.absolute())
                print(
                    f"{binaries}: {len(ALL)} hostile texts on {len(VALUES) + 5} ways: "
                    + ("; ".join(wrong) or "none evaluated")
                )
                status = status or bool(wrong)
        finally:
            lab.api.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
