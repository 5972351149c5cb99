# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""No module fails inside an exception handler, where Ansible would append the texts of all causes."""

from __future__ import annotations

import ast

from tests.conftest import ROOT

MODULES = ROOT / "plugins" / "modules"


def failures_in_handlers(source: str) -> list[int]:
    """Return the lines that use ``fail_json`` inside an ``except`` clause."""
    return sorted(
        {
            node.lineno
            for handler in ast.walk(ast.parse(source))
            if isinstance(handler, ast.ExceptHandler)
            for node in ast.walk(handler)
            if isinstance(node, ast.Attribute) and node.attr == "fail_json"
        }
    )


def test_no_module_fails_inside_a_handler():
    paths = sorted(MODULES.glob("*.py"))
    assert paths
    found = [f"{path.name}:{line}" for path in paths for line in failures_in_handlers(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(["fail_json inside an exception handler; use execution.run:", *found])


def test_the_check_finds_a_failure_inside_a_handler():
    assert failures_in_handlers("try:\n f()\nexcept OSError as error:\n if error:\n  module.fail_json(msg='')") == [5]
    assert failures_in_handlers("try:\n f()\nexcept OSError:\n failed = True\nmodule.fail_json(msg='')") == []
