# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine never compares modes: mode-specific behaviour is in the mode's object."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator

import pytest

ENGINE = Path(__file__).resolve().parents[2] / "plugins" / "module_utils"
# The only place that chooses a mode.
CHOICE = ENGINE / "convergence" / "modes" / "choose.py"
NAMES = {"iptables", "ipvs", "nftables", "userspace"}
CONSTANTS = {name.upper() for name in NAMES} | {f"{name.upper()}_MODE" for name in NAMES}
CLASSES = {f"{name.capitalize()}{kind}" for name in NAMES for kind in ("Mode", "Rendering")}


def _names_a_mode(node: ast.expr) -> bool:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(_names_a_mode(item) for item in node.elts)
    if isinstance(node, ast.Constant):
        return node.value in NAMES
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in CONSTANTS


def comparisons(source: str) -> Iterator[int]:
    """Yield the lines that compare a value with a mode, match it, or test the class of a mode's object."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            # A lookup such as ``"ipvs" in names`` concerns names, not the mode in effect.
            membership = isinstance(node.ops[0], (ast.In, ast.NotIn))
            operands = node.comparators if membership else [node.left, *node.comparators]
            if any(_names_a_mode(item) for item in operands):
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            words = {item.id for item in ast.walk(node.args[1]) if isinstance(item, ast.Name)}
            if words & CLASSES:
                yield node.lineno
        elif type(node).__name__ == "MatchValue" and _names_a_mode(node.value):  # type: ignore[attr-defined]
            yield node.value.lineno  # type: ignore[attr-defined]


def files() -> list[Path]:
    # The fleet's page runs beside Ansible and shows what nodes report.
    return sorted(path for path in ENGINE.rglob("*.py") if path != CHOICE and "fleet" not in path.parts)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ENGINE)))
def test_no_mode_is_compared(path: Path) -> None:
    assert list(comparisons(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("if configuration.mode == IPVS: pass", True),
        ("x = 1 if mode != 'nftables' else 2", True),
        ("if model.IPTABLES == mode: pass", True),
        ("if mode in (IPTABLES, IPVS): pass", True),
        ("if mode not in ('iptables', 'ipvs'): pass", True),
        ("if mode is IPVS_MODE: pass", True),
        ("if isinstance(mode, (IpvsMode, int)): pass", True),
        ("if mode in MODES: pass", False),
        ("if self.detect_local_mode == NODE_CIDR: pass", False),
        ("use(IPVS)", False),
    ],
)
def test_the_check_finds_comparisons(source: str, found: bool) -> None:
    assert bool(list(comparisons(source))) is found
