# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module kernel_modules: what it leaves if modules cannot be unloaded, and parameters that a boot does not set."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel import facts
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules import modules
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules.module_parameters import (
    ModuleParametersResource,
    parse_parameters,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support import kernel_modules
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Stage, plan
from ansible_collections.kubenode.proxy.plugins.modules import kernel_modules as module

BUILT_IN = "on the kernel's command line, since the module is built into the kernel"


def test_the_file_stays_while_its_modules_cannot_be_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "ip_vs 200 1 ip_vs_rr, Live 0x0\nip_vs_rr 16 2 - Live 0x0\n"
    read_text = facts.read_text
    monkeypatch.setattr(facts, "read_text", lambda path: text if path == "/proc/modules" else read_text(path))
    calls: list[str] = []
    monkeypatch.setattr(modules, "_rmmod", lambda name: (calls.append(name), (len(calls), "busy"))[1])
    path = tmp_path / "own.conf"
    path.write_text(modules.modules_load_file(["ip_vs", "ip_vs_rr"]))
    given = {"state": "absent", "unload": True, "persistent_file": str(path)}
    defaults = {name: option.get("default") for name, option in module._OPTIONS.items()}
    task = SimpleNamespace(params={**defaults, **given}, check_mode=True, _diff=False)
    for task.check_mode in (True, False):
        with pytest.raises(KernelError, match=r"^kernel module ip_vs_rr: cannot be unloaded, it has 2 user\(s\)$"):
            kernel_modules.changed(task)
    assert calls == []
    text = text.replace("ip_vs_rr 16 2", "ip_vs_rr 16 0")
    with pytest.raises(KernelError, match=r"^kernel module ip_vs_rr: cannot be unloaded: busy"):
        kernel_modules.changed(task)
    assert calls == ["ip_vs_rr"] and path.exists()


def test_parameters_of_built_in_modules_are_promised_for_this_boot_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is warned of once: with the difference if it cannot be changed now, else for the next boot."""
    directory = tmp_path / "sys/module/zswap/parameters"
    directory.mkdir(parents=True)
    for name, mode in (("enabled", 0o644), ("bits", 0o444)):
        (directory / name).write_text("0\n")
        (directory / name).chmod(mode)
    given = parse_parameters({"zswap": {"enabled": 1, "bits": 9}})
    warnings: list[str] = []
    task = SimpleNamespace(params={"unchangeable": "warn"}, warn=warnings.append)
    for built_in, persistent, expected in (
        ((), True, ["parameter zswap.bits: is 0, wanted 9: can only be set when the module is loaded"]),
        (
            ("zswap",),
            True,
            [
                f"parameter zswap.bits: is 0, wanted 9: can only be set at boot, as zswap.bits=9 {BUILT_IN}",
                f"parameter zswap.enabled: is not set at boot, only as zswap.enabled=1 {BUILT_IN}",
            ],
        ),
        (
            ("zswap",),
            False,
            [f"parameter zswap.bits: is 0, wanted 9: can only be set at boot, as zswap.bits=9 {BUILT_IN}"],
        ),
    ):
        resource = ModuleParametersResource(given, ["zswap"], str(tmp_path), built_in=built_in)
        kernel_modules.check_parameters(task, plan([Stage(resource, resource.wanted)]), persistent)
        assert warnings == expected
        warnings.clear()
    task.params["unchangeable"] = "fail"
    with pytest.raises(KernelError, match=r"since the module is built into the kernel; with unchangeable: warn, this"):
        kernel_modules.check_parameters(task, plan([Stage(resource, resource.wanted)]), True)
