# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
""".ci/bootstrap installs every program that the demonstration and the tests execute, from the list in .ci/programs.

The programs are read from the sources: the first word passed to a function that runs a command, or assigned to a name
that is passed to one, and the commands of shell scripts.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Iterator

import pytest

from tests.e2e import binaries, nodes
from tests.lab import uml
from tests.systemd import image

ROOT = Path(__file__).resolve().parents[3]
RUNNERS = {"run", "Popen", "check_call", "check_output", "Background", "output", "execute", "start", "commands", "_run"}
PROGRAM = re.compile(r"^(/usr)?(/s?bin/)?[a-z][a-z0-9_]*([.+-][a-z0-9_]+)*$")
# From packages that every Debian has: essential ones, and those its package manager requires.
ALWAYS = """
    apt-get awk basename bash cat chmod cmp command comm cp cut date dd dirname dpkg dpkg-deb echo env expand false find
    flock grep gzip head id ln ls md5sum mkdir mktemp mount mv nsenter perl printf readlink rm rmdir sed seq setpriv sh
    sha256sum sleep sort stat tail tar taskset tee test touch tr true truncate umount uname unshare wc xargs
"""
# First words passed to functions of the same names that are not programs of this machine: nodes, commands of the agent,
# playbooks, parameters of a function; and programs of the virtual environment or of some machines.
OTHERS = """
    address agent airgap ansible-builder ansible-lint ansible-test antsibull-changelog antsibull-docs chains changes
    check-jsonschema cleanup confirm converge debian13 diff docker drain explain firewalld first fleet-earlier
    fleet-this kubenode-proxy kubenode.proxy.explain lab-iptables lab-ipvs link molecule mypy
    net.ipv4.conf.all.route_localnet net.ipv4.vs.conntrack oneshot outside pyenv python python3-yaml reload reuse
    rollback ruff run schedule second static status systemctl top two verify yamllint
"""
#: Programs that tests execute on nodes with systemd, and the packages that have them.
ON_NODES = {
    "chown": "coreutils",
    "ctr": "containerd",
    "firewall-cmd": "firewalld",
    "getent": "libc-bin",
    "install": "coreutils",
    "journalctl": "systemd",
    "kill": "procps",
    "systemd-analyze": "systemd",
    "systemd-run": "systemd",
    "update-alternatives": "dpkg",
    "useradd": "passwd",
    "userdel": "passwd",
}
#: Every Debian has these packages.
ESSENTIAL = {"coreutils", "dpkg", "libc-bin", "passwd"}
SHELL = """
    ! [ [[ { } ( ) . : break cd continue do done elif else esac eval exec exit export fi if local read return set shift
    then trap umask unset until wait while
"""


def declared(*purposes: str) -> set[str]:
    """Return the programs of .ci/programs that are installed for these purposes."""
    lines = (ROOT / ".ci" / "programs").read_text(encoding="ascii").splitlines()
    found = [line.split() for line in lines if line and not line.startswith("#")]
    assert {needed for _program, _package, needed in found} == {"all", "demo", "uml", "test", "guest", "amx", "given"}
    return {program for program, _package, needed in found if needed in purposes}


def of_shell(script: str) -> Iterator[str]:
    """Yield the first words of the commands of a shell script, roughly: quoted words are not commands."""
    text = re.sub(r"<<'?(\w+)'?\n.*?\n\1\n", "\n", script, flags=re.DOTALL)
    text = re.sub(r"(?m)(^|\s)#.*$", "", text.replace("\\\n", " "))
    text = re.sub(r'"[^"$]*\$\(([^()]*)\)[^"$]*"', r" $(\1) ", text)
    text = re.sub(r"""'[^']*'|"(?:\\.|[^"\\$]|\$(?!\())*"|\\.""", "_Q_", text)
    for command in re.split(r"\|\|?|&&|;;?|\n|\$\(|`|\bthen\b|\bdo\b|\belse\b|\{ ", text):
        words = [word for word in command.split() if not re.match(r"^\w+=", word)]
        while words and (words[0] in SHELL.split() or words[0] in ("exec", "nice", "env")):
            words.pop(0)
        if words and words[0] not in ("for", "case") and PROGRAM.match(words[0]) and "()" not in command:
            yield words[0]


class Commands(ast.NodeVisitor):
    """The programs that a Python module executes."""

    def __init__(self, tree: ast.AST) -> None:
        self.found: list[str] = []
        self._given: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and self._name(node.func) in RUNNERS:
                for argument in node.args:
                    self._given |= {self._name(item) for item in self._parts(argument)} - {""}
        self.visit(tree)

    @staticmethod
    def _name(node: ast.AST) -> str:
        return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

    @staticmethod
    def _parts(node: ast.AST) -> list[ast.AST]:
        if isinstance(node, ast.Starred):
            return [node.value]
        if isinstance(node, (ast.List, ast.Tuple)):
            return [item.value for item in node.elts if isinstance(item, ast.Starred)]
        return [node]

    def _take(self, words: list[ast.expr]) -> None:
        words = [word for word in words if not isinstance(word, ast.Starred)]
        texts = [word.value if isinstance(word, ast.Constant) else None for word in words]
        if texts and isinstance(texts[0], str) and PROGRAM.match(texts[0]):
            self.found.append(texts[0])
            if texts[0] in ("sh", "bash") and "-c" in texts[:-1] and isinstance(texts[texts.index("-c") + 1], str):
                self.found += of_shell(str(texts[texts.index("-c") + 1]))

    def _literal(self, node: ast.AST) -> None:
        if isinstance(node, (ast.List, ast.Tuple)):
            self._take(node.elts)
        elif isinstance(node, ast.BinOp):
            self._literal(node.left)

    def visit_Call(self, node: ast.Call) -> None:
        if self._name(node.func) in RUNNERS:
            self._take(node.args)
            for argument in node.args:
                self._literal(argument)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._given & {self._name(target) for target in node.targets}:
            self._literal(node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and self._name(node.target) in self._given:
            self._literal(node.value)
        self.generic_visit(node)


def programs_of(path: Path) -> set[str]:
    """Return the programs that a file executes, without their directories."""
    text = path.read_text(encoding="utf-8")
    found = Commands(ast.parse(text)).found if path.suffix == ".py" else list(of_shell(text))
    functions = set(re.findall(r"(?m)^ *(\w+)\(\) \{", text))
    # All of these are iptables.
    names = {re.sub(r"^ip6?tables(-legacy|-nft)?(-save|-restore)?$", "iptables", Path(name).name) for name in found}
    return names - functions


def sources() -> list[Path]:
    """Return the files that run on this machine, or run programs on nodes of tests/systemd and tests/e2e.

    Not those that run on such a node, or on one of Molecule.
    """
    names = ("lab", "kernel", "modules", "fleet", "monitoring", "conformance", "apiserver", "netpol", "soak", "systemd")
    folders = [ROOT / "tests" / name for name in (*names, "e2e", "benchmarks")]
    found = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    scripts = [path for path in sorted((ROOT / ".ci").iterdir()) if path.read_text().startswith("#!/bin/sh")]
    found = [path for path in found if path.parent.name != "inside"]
    others = sorted((ROOT / "tests").glob("*.py"))
    inside = {"checks.py", "inside.py"}
    others += [path for path in sorted((ROOT / "tests/molecule_support").glob("*.py")) if path.name not in inside]
    return [*found, *others, *scripts]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_program_is_installed(path):
    needed = ["all", "demo", "uml", "test", "guest"]
    if path.parent.name in ("lab", "demo") and path.name not in ("qemu.py", "stock_kernel.py"):
        needed = ["all", "demo", "uml"]
    on_nodes = set(ON_NODES) if path.parent.name in ("systemd", "e2e") else set()
    missing = programs_of(path) - declared(*needed) - set(ALWAYS.split()) - set(OTHERS.split()) - on_nodes
    assert not missing, f"{path.relative_to(ROOT)} executes what .ci/programs does not name: {sorted(missing)}"


def test_nodes_have_the_packages_of_the_programs_that_tests_execute_there():
    used = {name for path in sources() if path.parent.name in ("systemd", "e2e") for name in programs_of(path)}
    assert set(ON_NODES) <= used
    assert set(ON_NODES.values()) <= {*image.PACKAGES, *nodes.PACKAGES, *ESSENTIAL}


def test_programs_without_a_package_are_those_of_the_end_to_end_suite():
    assert declared("given") == set(binaries.PROGRAMS)


def test_a_compiler_for_the_shim_of_user_mode_linux_is_declared():
    assert declared("amx") == {uml.COMPILERS[-1]}


@pytest.mark.parametrize("path", sorted((ROOT / "tests/unit").rglob("*.py")), ids=lambda path: path.name)
def test_unit_tests_need_only_the_programs_of_every_command(path):
    """``make quick`` installs nothing else."""
    assert not programs_of(path) & (declared("demo", "uml", "test", "guest") - declared("all"))


def test_the_check_finds_an_undeclared_program(tmp_path):
    module = tmp_path / "helper.py"
    module.write_text(
        'ANSWERING = ["socat", "TCP-LISTEN:8080"]\n'
        'def begin(inside):\n    start(ANSWERING)\n    run([*inside, "ncat", "-l"])\n'
        '    run("telnet", "::1")\n    run(["sh", "-c", "echo x | jq . && rsync a b"])\n'
    )
    assert programs_of(module) - set(ALWAYS.split()) == {"socat", "ncat", "telnet", "jq", "rsync"}
    script = tmp_path / "script"
    script.write_text('#!/bin/sh\ncd "$(realpath "$0")" || { logger no; exit; }\nfor a in b; do pv $a; done # no zip\n')
    assert programs_of(script) - set(ALWAYS.split()) == {"realpath", "logger", "pv"}
