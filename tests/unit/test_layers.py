# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test that the layers of the engine import one way only, and that none of them imports Ansible."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Iterator

import pytest

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
ENGINE = PLUGINS / "module_utils"
COLLECTION = "ansible_collections.kubenode.proxy.plugins."

# Each layer may import itself and the layers before it; those in the first row are one layer.
ORDER = (
    ("base", "resources", "differences", "clients", "event_reasons"),
    ("cluster", "packaging"),
    ("configuration",),
    ("serviceports", "networkpolicy"),
    ("rendering",),
    ("kernel", "forwarding"),
    ("preflight",),
    ("convergence",),
    ("explain", "rollback"),
    ("agent", "module_support", "controller", "generic"),
    ("command",),
)
# Of the kernel's subsystems, each folder may import itself and the folders named, and no other file of ``kernel/``.
SUBSYSTEMS: dict[str, tuple[str, ...]] = {
    "kernel.netlink": (),
    "kernel.rtnetlink": ("kernel.netlink",),
    "kernel.ipset": ("kernel.netlink",),
    "kernel.nftables": ("kernel.netlink",),
    "kernel.nftables.raw": ("kernel.netlink", "kernel.nftables"),
    "kernel.nftables.traffic": ("kernel.netlink", "kernel.nftables"),
}
# Code shared by the modules: the only part of the shared code that may name Ansible's own module class.
ADAPTER = "module_support"
RANK: dict[str, int] = {name: rank for rank, names in enumerate(ORDER) for name in names}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of everything a file imports, wherever the statement is."""
    package = ["plugins", *path.relative_to(PLUGINS).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


def layer_of(dotted: str) -> str:
    """Return the layer of an absolute name inside the engine, empty for names outside."""
    name = dotted[len("ansible_collections.kubenode.proxy.") :] if dotted.startswith(COLLECTION) else dotted
    parts = name.split(".")
    return parts[2] if parts[:2] == ["plugins", "module_utils"] and len(parts) > 2 else ""


def violations(path: Path, own: str) -> list[str]:
    """Return a layer's forbidden imports in a file: of a later layer, of a neighbour in the last one, or of Ansible."""
    found = []
    for line, name in imports_of(path):
        layer = layer_of(name)
        if name.split(".")[0] in ("ansible", "ansible_collections") and not (
            own == ADAPTER and name.startswith("ansible.module_utils.")
        ):
            found.append(f"{path.name}:{line} imports {name}")
        elif layer and layer != own and (layer not in RANK or RANK[layer] > RANK[own]):
            found.append(f"{path.name}:{line} ({own}) imports {name}")
        elif layer and layer != own and RANK[layer] == RANK[own] and RANK[own] > 0:
            found.append(f"{path.name}:{line} ({own}) imports its neighbour {name}")
    return found


def engine_files() -> list[Path]:
    return sorted(path for path in ENGINE.rglob("*.py") if path.relative_to(ENGINE).parts != ("__init__.py",))


def test_every_file_of_the_engine_is_in_a_known_layer() -> None:
    layers = {path.relative_to(ENGINE).parts[0].replace(".py", "") for path in engine_files()}
    assert layers <= set(RANK)
    assert {"base", "cluster", "serviceports", "rendering", "kernel"} <= layers


@pytest.mark.parametrize("path", engine_files(), ids=lambda path: str(path.relative_to(ENGINE)))
def test_imports_lead_to_earlier_layers_only(path: Path) -> None:
    own = path.relative_to(ENGINE).parts[0].replace(".py", "")
    assert violations(path, own) == []


@pytest.mark.parametrize("path", sorted((PLUGINS / "modules").glob("*.py")), ids=lambda path: path.name)
def test_modules_import_the_engine_and_ansible_module_utils_only(path: Path) -> None:
    allowed = ("ansible.module_utils.", COLLECTION + "module_utils.")
    forbidden = [
        f"{line}: {name}"
        for line, name in imports_of(path)
        if name.split(".")[0] in ("ansible", "ansible_collections") and not name.startswith(allowed)
    ]
    assert forbidden == []


@pytest.mark.parametrize(
    ("own", "statement", "bad"),
    [
        ("serviceports", "from ..kernel.netlink import Socket", True),
        ("serviceports", "from ..cluster.model import Service", False),
        ("serviceports", "def f():\n    from ..kernel import netlink", True),
        ("serviceports", "from . import routes", False),
        ("serviceports", "from .. import kernel", True),
        ("agent", "from ..module_support.results import x", True),
        ("kernel", "from ansible.module_utils.basic import AnsibleModule", True),
        ("kernel", "import ansible_collections.kubenode.proxy.plugins.module_utils.base.errors", True),
    ],
)
def test_the_check_finds_forbidden_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, statement: str, bad: bool
) -> None:
    monkeypatch.setitem(imports_of.__globals__, "PLUGINS", tmp_path)
    path = tmp_path / "module_utils" / own / "sample.py"
    path.parent.mkdir(parents=True)
    path.write_text(statement + "\n", encoding="utf-8")
    assert bool(violations(path, own)) is bad


def module_name(path: Path) -> str:
    """Return the name of a file of the engine below ``module_utils``."""
    return ".".join(path.relative_to(ENGINE).with_suffix("").parts).replace(".__init__", "")


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Return which files of the engine each file imports."""
    names = {module_name(path): path for path in engine_files()}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        graph[name] = set()
        for _line, dotted in imports_of(path):
            inner = dotted.replace("plugins.module_utils.", "")
            found = next((one for one in (inner, inner.rpartition(".")[0]) if one in names), "")
            if found and found != name:
                graph[name].add(found)
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return one circle of a graph, empty if it has none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for following in sorted(graph.get(name, ())):
            found = walk(following, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    return next((circle for circle in (walk(name, []) for name in sorted(graph)) if circle), [])


def test_no_file_imports_itself_indirectly() -> None:
    graph = import_graph()
    assert circle_in(graph) == []
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def folder_graph(graph: dict[str, set[str]], top: str) -> dict[str, set[str]]:
    """Return which folders, and files beside them, of one layer import each other, by the names of the first two."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        for other in others:
            one, two = (".".join(each.split(".")[:2]) for each in (name, other))
            if name.startswith(f"{top}.") and other.startswith(f"{top}.") and one != two:
                found.setdefault(one, set()).add(two)
    return found


@pytest.mark.parametrize("top", sorted(RANK))
def test_no_two_folders_import_each_other(top: str) -> None:
    """Also not indirectly: so each folder can be understood with those below it only."""
    assert circle_in(folder_graph(import_graph(), top)) == []


def test_the_check_finds_folders_that_import_each_other() -> None:
    graph = {"agent.a.one": {"agent.b.two"}, "agent.b.three": {"agent.c"}, "agent.c": {"agent.a.four", "kernel.x"}}
    assert circle_in(folder_graph(graph, "agent")) == ["agent.a", "agent.b", "agent.c", "agent.a"]


def test_subsystems_of_the_kernel_import_those_below_them_only() -> None:
    imported: dict[str, set[str]] = {folder: set() for folder in SUBSYSTEMS}
    for name, others in import_graph().items():
        folder = name.rpartition(".")[0]
        if folder in SUBSYSTEMS:
            imported[folder] |= {other.rpartition(".")[0] for other in others if other.startswith("kernel")}
    assert all(imported.values()), "a folder has no file that imports another one"
    assert not {folder: bad for folder, found in imported.items() if (bad := found - {folder, *SUBSYSTEMS[folder]})}
