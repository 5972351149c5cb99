# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every imported library is declared in the file from which it is installed."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Iterator

import pytest

ROOT = Path(__file__).resolve().parents[3]
OWN = {"ansible_collections", "module_utils", "plugins", "tests"}
# The distribution's name if it differs from the package's. ansible is part of ansible-core, which needs jinja2 itself.
DISTRIBUTIONS = {
    "yaml": "PyYAML",
    "ansible": "ansible-core",
    "jinja2": "ansible-core",
    "testinfra": "pytest-testinfra",
    "_pytest": "pytest",
}


def imported(path: Path) -> Iterator[str]:
    """Yield the top-level packages that a file imports, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]


def third_party(folder: str) -> dict[str, Path]:
    """Return the packages of other projects that a folder imports, each with a file that does."""
    found: dict[str, Path] = {}
    local = {path.stem for path in (ROOT / folder).rglob("*.py")}
    local.update(path.name for path in (ROOT / folder).rglob("*") if path.is_dir())
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name in imported(path):
            if name not in sys.stdlib_module_names and name not in OWN | local:
                found.setdefault(DISTRIBUTIONS.get(name, name), path)
    return found


def declared(*names: str) -> set[str]:
    """Return the distributions in these files, lower case and with hyphens."""
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in names)
    found = re.findall(r"^ *(?:- +)?([A-Za-z][\w-]*)(?=[ <>=~,!]|$)", text, re.MULTILINE)
    return {name.lower().replace("_", "-") for name in found}


@pytest.mark.parametrize(
    ("folder", "files"),
    [
        # Code that needs the package kubernetes documents that; its absence is an error that names it.
        ("plugins", ["meta/ee-requirements.txt", "requirements-demo.txt", "roles/agent/files/libraries.txt"]),
        ("tests", ["requirements-dev.txt", "requirements-benchmarks.txt"]),
        ("molecule", ["requirements-dev.txt"]),
    ],
)
def test_every_import_is_declared(folder: str, files: list[str]) -> None:
    # ansible-rulebook runs in an environment of its own (.ci/cores).
    optional = {"kubernetes"} if folder == "plugins" else {"ansible-rulebook"}
    names = {name.lower().replace("_", "-") for name in third_party(folder)} - optional
    assert names - declared(*files) == set(), third_party(folder)


def test_an_undeclared_import_is_noticed() -> None:
    assert "pyroute2" in third_party("tests") and "pyroute2" in declared("requirements-dev.txt")
    assert "PyYAML" in third_party("plugins") and "no-such-library" not in declared("requirements-dev.txt")
