# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection's metadata: modules as ansible-doc shows them, roles, playbooks, settings in meta/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Mapping, NamedTuple

import yaml

from tests.conftest import ROOT, make_link

NAME = "kubenode.proxy"


class Role(NamedTuple):
    """A role: its argument specification by entry point, and its defaults."""

    name: str
    directory: Path
    entry_points: Mapping[str, Mapping[str, Any]]
    defaults: Mapping[str, Any]


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def roles(root: Path = ROOT) -> list[Role]:
    """Return all roles in alphabetical order."""
    found = []
    for directory in sorted((root / "roles").iterdir()):
        specification = directory / "meta" / "argument_specs.yml"
        defaults = directory / "defaults" / "main.yml"
        if (directory / "tasks").is_dir():
            entry_points = _yaml(specification)["argument_specs"] if specification.exists() else {}
            values = (_yaml(defaults) or {}) if defaults.exists() else {}
            found.append(Role(directory.name, directory, entry_points, values))
    return found


def module_names(root: Path = ROOT) -> list[str]:
    """Return the names of the modules, without the collection's name."""
    return sorted(path.stem for path in (root / "plugins" / "modules").glob("*.py"))


def inventory_names(root: Path = ROOT) -> list[str]:
    """Return the names of the inventory plugins, without the collection's name."""
    return sorted(path.stem for path in (root / "plugins" / "inventory").glob("*.py"))


def playbook_names(root: Path = ROOT) -> list[str]:
    """Return the names of the playbooks, without the collection's name."""
    return sorted(path.stem for path in (root / "playbooks").glob("*.yml"))


def runtime(root: Path = ROOT) -> dict[str, Any]:
    """Return the content of meta/runtime.yml."""
    content = _yaml(root / "meta" / "runtime.yml")
    assert isinstance(content, dict)
    return content


def _collections_path(root: Path) -> Path:
    """Return the collections path of this tree, which may already be a collection's directory (for ansible-test)."""
    if root.parent.parent.name == "ansible_collections":
        return root.parent.parent.parent
    make_link()
    return root / "collections"


def modules(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Return ansible-doc's output for each module (keys doc, examples, return), with shared fragments."""
    return _documented("module", module_names(root), root)


def inventories(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Return ansible-doc's output for each inventory plugin, with shared fragments."""
    return _documented("inventory", inventory_names(root), root)


def _documented(kind: str, own_names: list[str], root: Path) -> dict[str, dict[str, Any]]:
    names = [f"{NAME}.{name}" for name in own_names]
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(_collections_path(root)),
        "ANSIBLE_HOME": str(root / ".cache" / "ansible"),
        "ANSIBLE_DEPRECATION_WARNINGS": "0",
    }
    argv = [sys.executable, "-m", "ansible.cli.doc", "--json", "-t", kind, *names]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ansible-doc ended with status {done.returncode}: {done.stderr.strip()}")
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    missing = [name for name in names if name not in found]
    if missing:
        raise RuntimeError(f"ansible-doc does not know {', '.join(missing)}: {done.stderr.strip()}")
    return {name.rsplit(".", 1)[-1]: found[name] for name in names}
