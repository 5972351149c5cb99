# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module kernel_modules where modules are to be unloaded: what it leaves if that fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from ansible_collections.kubenode.proxy.plugins.module_utils.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel import facts, modules
from ansible_collections.kubenode.proxy.plugins.modules import kernel_modules


def test_the_file_stays_while_its_modules_cannot_be_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "ip_vs 200 1 ip_vs_rr, Live 0x0\nip_vs_rr 16 2 - Live 0x0\n"
    read_text = facts.read_text
    monkeypatch.setattr(facts, "read_text", lambda path: text if path == "/proc/modules" else read_text(path))
    calls: list[str] = []
    monkeypatch.setattr(modules, "_rmmod", lambda name: (calls.append(name), (len(calls), "busy"))[1])
    path = tmp_path / "own.conf"
    path.write_text("ip_vs\nip_vs_rr\n")
    given = {"state": "absent", "unload": True, "persistent_file": str(path)}
    defaults = {name: option.get("default") for name, option in kernel_modules._argument_spec().items()}
    task = SimpleNamespace(params={**defaults, **given}, check_mode=True, _diff=False)
    for task.check_mode in (True, False):
        with pytest.raises(KernelError, match=r"^kernel module ip_vs_rr: cannot be unloaded, it has 2 user\(s\)$"):
            kernel_modules._changed(task)
    assert calls == []
    text = text.replace("ip_vs_rr 16 2", "ip_vs_rr 16 0")
    with pytest.raises(KernelError, match=r"^kernel module ip_vs_rr: cannot be unloaded: busy"):
        kernel_modules._changed(task)
    assert calls == ["ip_vs_rr"] and path.exists()
