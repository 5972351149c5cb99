# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detection of built-in features on a kernel without module lists; the probes must not load or change anything."""

from __future__ import annotations

import subprocess

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import mode_named
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel import built_in, facts
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules import module_profile, modules
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.check import Intention, preflight

RELEASE = facts.kernel_release()
SCHEDULERS = ("rr", "wrr", "lc", "wlc", "sh", "mh")


def without_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the kernel's module lists and its configuration, as if neither were installed."""
    monkeypatch.setattr(modules, "_built_in_by_configuration", lambda *_arguments: set())
    read = facts.read_text
    hidden = ("modules.builtin", "modules.dep")
    monkeypatch.setattr(facts, "read_text", lambda path: None if path.endswith(hidden) else read(path))


def kernel_state() -> list[str]:
    """Return the virtual servers, the sets and the names of the loaded modules."""
    commands = (["ipvsadm", "-Sn"], ["ipset", "save"], ["cut", "-d", " ", "-f", "1", "/proc/modules"])
    return [subprocess.run(command, check=True, capture_output=True, text=True).stdout for command in commands]


@pytest.mark.uml
def test_all_features_of_ipvs_mode_are_detected_without_module_lists(monkeypatch):
    wanted = module_profile.modules_for("ipvs", SCHEDULERS)
    before = kernel_state()
    without_lists(monkeypatch)
    # A kernel with everything built in shows in /sys/module only the modules that have parameters.
    monkeypatch.setattr(modules, "loaded_modules", lambda _root="": dict.fromkeys(("ip_set", "dummy"), 0))
    assert set(wanted) - modules.present_modules(wanted, RELEASE) == set()
    assert modules.present_modules(["ip_vs_nosuch", "ip_set_nosuch", "xt_nosuch"], RELEASE) == set()
    assert kernel_state() == before
    assert modules.ModulesResource(wanted).observe() == modules.ModulesResource(wanted).desired()
    assert preflight(Intention(mode_named("ipvs").needs, ("IPv4",), schedulers=SCHEDULERS)) == []


def test_no_probe_loads_a_module(monkeypatch):
    for name in ("IpsetSocket", "IpvsSocket", "NetlinkSocket"):
        monkeypatch.setattr(built_in, name, lambda *_arguments, name=name: pytest.fail(f"{name} was opened"))
    monkeypatch.setattr(built_in, "read_text", lambda _path: "")
    for module in ("ip_vs_rr", "ip_set_hash_ip", "xt_set", "dummy"):
        assert not built_in.answers(module, lambda _subsystem: False)
    # A module whose file is installed is left to modprobe.
    without_lists(monkeypatch)
    monkeypatch.setattr(modules, "available_modules", lambda *_arguments: {"ip_vs_rr", "ip_set_hash_ip", "xt_set"})
    assert modules.present_modules(["ip_vs_rr", "ip_set_hash_ip", "xt_set"], RELEASE) == set()
