# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module service_proxy imports only what most runs need, because Ansible ships it as source.

Each run on each node compiles whatever is imported. A file imported at the top of another one can bring a package in
again unnoticed.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_ENGINE = "ansible_collections.kubenode.proxy.plugins.module_utils"
_MODULE = "ansible_collections.kubenode.proxy.plugins.modules.service_proxy"
_COMPLETE = f"{_ENGINE}.module_support.complete"


def imports_of(*names):
    """Return the names of all modules after an import of ``names`` in a new process."""
    program = f"import sys, {', '.join(names)}; print(*sys.modules, sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def imported():
    return imports_of(_MODULE, _COMPLETE)


@pytest.mark.parametrize(
    "name",
    [
        "networkpolicy.node_policy",
        "preflight.ipvs_sets",
        "rendering.desired",
        "rendering.ipvs.entries",
        "rendering.networkpolicy.elements",
        "rendering.networkpolicy.layout",
        "rendering.networkpolicy.text",
        "rendering.nftables.rule_text",
        "cluster.api.client",
        "cluster.api.connection",
        "rollback.revert",
        "convergence.probing.attempts",
        "packaging.running",
        "rollback.restore",
        "rollback.state",
        "rollback.store",
        "convergence.modes.stages.ipvs",
        "convergence.modes.stages.release",
        "kernel.built_in",
        "kernel.conntrack.stale",
        "kernel.ipset.sets",
        "kernel.ipvs.servers",
        "kernel.nftables.raw",
        "kernel.xtables.saved",
        "agent",
        "controller",
    ],
)
def test_what_few_runs_need_is_not_imported(imported, name):
    assert f"{_ENGINE}.{name}" not in imported


@pytest.mark.parametrize("library", ["http.client", "ssl", "zipfile"])
def test_libraries_that_few_runs_need_are_not_imported(imported, library):
    assert library not in imported


@pytest.mark.parametrize("mode", ["iptables", "ipvs", "nftables", "userspace"])
def test_no_mode_is_imported_before_it_is_chosen(imported, mode):
    assert not [name for name in imported if name.startswith(f"{_ENGINE}.convergence.modes.{mode}")]
    assert f"{_ENGINE}.rendering.{mode}.mode" not in imported


def test_the_engine_is_imported(imported):
    assert f"{_ENGINE}.convergence.converge" in imported


def test_a_run_that_ends_early_imports_little():
    early = {name[len(_ENGINE) + 1 :] for name in imports_of(_MODULE) if name.startswith(f"{_ENGINE}.")}
    assert "convergence.unchanged.decision" in early
    heavy = ("cluster", "configuration", "networkpolicy", "rendering", "serviceports", "packaging", "resources")
    assert not [name for name in early if name.split(".")[0] in heavy]
    assert "convergence.converge" not in early and "convergence.unchanged.recorder" not in early
    # Python compiles some 30,000 lines of an engine a second: this is a limit in milliseconds.
    assert len(early) < 50, sorted(early)
