# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The demonstration runs with what ``.ci/bootstrap demo`` installs: ansible-core and its dependencies."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.conftest import ROOT

# Refuse the packages that only the development environment has, then import the demonstration with all that it imports.
PROGRAM = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    sys.modules[name] = None
import tests.lab.demo as package
for module in pkgutil.iter_modules(package.__path__):
    importlib.import_module(f"tests.lab.demo.{module.name}")
"""
IMPORTED = {"pytest-testinfra": "testinfra", "pytest-xdist": "xdist", "ansible-lint": "ansiblelint"}


def test_the_demonstration_needs_no_package_of_the_development_environment():
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    names = [match.group() for match in map(re.compile(r"[A-Za-z][A-Za-z0-9._-]*").match, lines) if match]
    assert "pytest" in names
    refused = [IMPORTED.get(name, name.replace("-", "_")) for name in names if name != "ansible-core"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *refused], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
