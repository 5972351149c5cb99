# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The demonstration runs with what ``.ci/bootstrap demo`` installs: ansible-core and its dependencies."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

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


def bootstrap(tmp_path, machine: str, purpose: str) -> str:
    """Return what .ci/bootstrap says to an unprivileged user on a machine of that architecture without any program."""
    for program in ("cat", "dirname", "grep", "sh"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    for program, answer in (("uname", machine), ("id", "1000")):
        (tmp_path / program).write_text(f"#!/bin/sh\necho {answer}\n")
        (tmp_path / program).chmod(0o755)
    done = subprocess.run(
        [str(ROOT / ".ci" / "bootstrap"), purpose],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    return done.stderr


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_demonstration_needs_user_mode_linux_only_where_it_starts_a_guest(tmp_path, machine):
    said = bootstrap(tmp_path, machine, "demo")
    assert " python3 " in said
    guest = machine == "x86_64" and not os.path.exists("/proc/net/ip_vs")
    assert ("user-mode-linux" in said) == guest


def test_the_tests_are_refused_where_their_guests_do_not_run(tmp_path):
    assert "needs x86_64; this machine is aarch64" in bootstrap(tmp_path, "aarch64", "lab")
