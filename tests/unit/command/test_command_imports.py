# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node command imports only what it needs: a query of the agent does not import the agent."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.archive import pack
from tests.unit.command.node_command import STATUS

ENGINE = Path(__file__).resolve().parents[3] / "plugins" / "module_utils"
#: Run the archive as the interpreter would, and write the names of the imported modules.
LOADED = """\
import runpy, sys
path, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_path(path, run_name="__main__")
except SystemExit as exit:
    print(f"exit {exit.code}", file=sys.stderr)
print("\\n".join(sys.modules), file=sys.stderr)
"""
#: Packages of the engine, and third-party ones, that are slow to import or belong to the agent.
HEAVY = ("agent", "kernel", "rendering", "serviceports", "preflight", "cluster", "configuration")
THIRD_PARTY = {"http.server", "http.client", "prometheus_client", "kubernetes", "yaml", "ssl", "asyncio"}
# The answer to any question: of each, what the command reads.
ANSWER = {
    **STATUS,
    "destination": "shop/web",
    "zone": "",
    "found": [],
    "leftToPrograms": ["shop/web"],
    "client": "",
    "from": "shop/web",
    "to": "shop/db:80/tcp",
    "allowed": False,
    "notes": [],
    "connections": [],
}
EXPLAIN = ("explain", "--from", "shop/web", "--to", "shop/db:80")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("archive") / "kubenode-proxy.pyz"
    path.write_bytes(pack(str(ENGINE)).content)
    return str(path)


def loaded(archive: str, *words: str) -> list[str]:
    """Run the packed command; return its exit code as ``exit N``, and the modules it imported."""
    command = [sys.executable, "-I", "-B", "-c", LOADED, archive, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.startswith("exit ")) :]


def heavy(modules: list[str]) -> set[str]:
    parts = {name.split(".")[1] for name in modules if name.startswith("kubenode_proxy.")}
    return parts & set(HEAVY) | THIRD_PARTY & set(modules)


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("completion", "bash"), ("rollback", "--help")])
def test_commands_without_node_or_agent_import_neither(archive: str, words: list[str]) -> None:
    code, *modules = loaded(archive, *words)
    assert code == "exit 0" and "kubenode_proxy.command.cli" in modules
    assert heavy(modules) == set()


@pytest.mark.parametrize(("words", "code"), [(("status",), 0), (("explain", "shop/web"), 3), (EXPLAIN, 3)])
def test_a_query_of_the_agent_does_not_import_it(archive: str, tmp_path: Path, words: list[str], code: int) -> None:
    path = str(tmp_path / "agent.sock")

    def serve() -> None:
        client = listener.accept()[0]
        with client:
            client.recv(4096)
            client.sendall(json.dumps(ANSWER).encode() + b"\n")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        found, *modules = loaded(archive, *words, "--control", path)
        thread.join()
    assert found == f"exit {code}" and "kubenode_proxy.convergence.runtime.agent_client" in modules
    assert heavy(modules) == set()


def test_a_confirmation_imports_only_the_program_runner_of_kernel(archive: str, tmp_path: Path) -> None:
    code, *modules = loaded(archive, "confirm", "--history", str(tmp_path / "none"))
    assert code == "exit 0"
    assert heavy(modules) == {"kernel"}
    assert {name for name in modules if name.startswith("kubenode_proxy.kernel.")} == {"kubenode_proxy.kernel.programs"}


def test_only_run_imports_the_agent(archive: str, tmp_path: Path) -> None:
    _code, *modules = loaded(archive, "converge", "--check", "--snapshot", str(tmp_path / "none.json"))
    assert "kubenode_proxy.convergence.converge" in modules
    assert "agent" not in heavy(modules)
    token = tmp_path / "token"
    token.write_text("none")
    _code, *modules = loaded(archive, "converge", "--kubeconfig", str(tmp_path / "none"), "--token", str(token))
    assert {f"kubenode_proxy.cluster.api.access.{name}" for name in ("servers", "token_renewal")} <= set(modules)
    assert "agent" not in heavy(modules)
    _code, *modules = loaded(archive, "run", "--config", str(tmp_path / "none.yaml"))
    assert "agent" in heavy(modules)
