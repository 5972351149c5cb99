# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Allow only short lists of positional arguments, in which readers and type checkers cannot see a swap."""

from __future__ import annotations

import ast

from tests.conftest import ROOT

PLUGINS = ROOT / "plugins"
MOST = 5
# Rows of a table, values of a row, fields of a C struct, a libc function, expressions of a rule; and tuples with one
# line per field, or created for each endpoint of a cluster.
POSITIONAL = frozenset(("Endpoint", "Field", "Shared", "SliceEndpoint", "_parse_row", "function", "pack", "rule"))


def long_lists(tree: ast.AST) -> list[str]:
    """Return ``LINE: NAME`` for each definition and each call with too many positional arguments."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
            if len(names) - (names[:1] in (["self"], ["cls"])) > MOST and node.name not in POSITIONAL:
                found.append(f"{node.lineno}: def {node.name}")
        elif isinstance(node, ast.Call) and len(node.args) > MOST:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in POSITIONAL:
                found.append(f"{node.lineno}: {name}()")
    return found


def test_many_arguments_are_passed_by_keyword():
    found = []
    for path in sorted(PLUGINS.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        found += [f"{name}:{hit}" for hit in long_lists(ast.parse(path.read_text(encoding="utf-8")))]
    assert not found, "\n".join([f"more than {MOST} positional arguments:", *found])


def test_the_check_finds_definitions_and_calls():
    assert long_lists(ast.parse("class A:\n def f(self, a, b, c, d, e): pass\nf(1, 2, 3, 4, 5)")) == []
    source = "def f(a, b, c, d, e, g): pass\nx.y(1, 2, 3, 4, 5, 6)\nHEAD.pack(1, 2, 3, 4, 5, 6)"
    assert long_lists(ast.parse(source)) == ["1: def f", "2: y()"]
