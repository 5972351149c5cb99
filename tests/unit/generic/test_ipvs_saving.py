# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Saved virtual servers: the file has what the kernel has after a task, whatever other tasks do at the same time."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES, family_of
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime import lock
from ansible_collections.kubenode.proxy.plugins.module_utils.generic import ipvs_saving
from ansible_collections.kubenode.proxy.plugins.module_utils.generic import ipvs_services as listed
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.servers import (
    RealServersResource,
    VirtualServersResource,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServer,
    RealServerKey,
    VirtualServer,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, Stage

WEB = VirtualServerKey("tcp", "192.0.2.1", 80)


class Kernel:
    """The tables of a load balancer, and what a connection to IPVS does with them.

    ``meanwhile`` is called after each observation of real servers.
    """

    def __init__(self) -> None:
        self.servers: dict[VirtualServerKey, VirtualServer] = {}
        self.reals: dict[RealServerKey, RealServer] = {}
        self.meanwhile = lambda: None

    def virtual_servers(self, family: str, marks: bool) -> dict[VirtualServerKey, VirtualServer]:
        return {key: value for key, value in self.servers.items() if family_of(key.address) == family}

    def real_servers(self, family: str, marks: bool) -> Any:
        found = {key: value for key, value in list(self.reals.items()) if family_of(key.server.address) == family}
        self.meanwhile()
        return SimpleNamespace(servers=found, connections={}, used={})

    def timeouts(self) -> dict[str, int]:
        return {"tcp": 900, "tcp_fin": 120, "udp": 300}


def applying(table: str) -> Any:
    """Return the method of a resource that changes a table of its kernel."""

    def apply(self: Any, change: Change[Any, Any]) -> None:
        entries = getattr(self._socket, table)
        entries.update(change.added)
        entries.update({key: new for key, (_old, new) in change.replaced.items()})
        for key in change.removed:
            del entries[key]

    return apply


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(ipvs_saving, "DIRECTORY", str(tmp_path / "run"))
    monkeypatch.setattr(VirtualServersResource, "apply", applying("servers"))
    monkeypatch.setattr(RealServersResource, "apply", applying("reals"))
    return Kernel()


def task(kernel: Any, last: int) -> list[Stage]:
    """Return what a task declares that adds one host to the real servers."""
    real = (listed.ListedReal(f"10.0.0.{last}"),)
    server = listed.ListedServer("192.0.2.1", 80, exclusive=False, real_servers=real)
    return listed.stages(kernel, listed.listed_tables([server]), purge=(), present=True, timeouts={}, families=FAMILIES)


def test_the_file_has_what_the_kernel_has_after_the_change(kernel: Any, tmp_path: Path) -> None:
    """Another program, or a task that does not save, changes the tables between observation and change."""
    path = str(tmp_path / "rules")
    other = RealServerKey(WEB, "10.0.0.9", 80)
    check = ipvs_saving.predict(kernel, task(kernel, 1), path, {"udp": 60})
    assert not Path(path).exists() and kernel.servers == {}
    (predicted,) = check[-1].change.added.values()
    assert predicted.splitlines()[0] == "--set 900 120 60" and "10.0.0.1" in predicted
    kernel.meanwhile = lambda: kernel.reals.update({other: RealServer(3)})
    first = ipvs_saving.change(kernel, task(kernel, 1), path)
    assert Path(path).read_text().splitlines() == [
        "--set 900 120 300",
        "-A -t 192.0.2.1:80 -s wlc",
        "-a -t 192.0.2.1:80 -r 10.0.0.1:80 -m -w 1",
        "-a -t 192.0.2.1:80 -r 10.0.0.9:80 -m -w 3",
    ]
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert [bool(item.change) for item in first] == [True, True, False, False, True]
    assert not any(item.change for item in ipvs_saving.change(kernel, task(kernel, 1), path))


def test_tasks_of_many_hosts_save_every_real_server(kernel: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "rules")
    # Without turns, the first to observe would be the last to write.
    seen = itertools.count()
    kernel.meanwhile = lambda: time.sleep(max(0.0, 0.06 - 0.002 * next(seen)))
    hosts = range(1, 9)
    threads = [
        threading.Thread(target=lambda last=last: ipvs_saving.change(kernel, task(kernel, last), path))
        for last in hosts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = Path(path).read_text().splitlines()
    assert [f"-a -t 192.0.2.1:80 -r 10.0.0.{last}:80 -m -w 1" for last in hosts] == lines[2:]


def test_only_tasks_that_save_wait_for_each_other(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_TASK_SECONDS", 0.2)
    path = str(tmp_path / "rules")
    with lock.task_lock(ipvs_saving.DIRECTORY):
        with pytest.raises(KernelError, match=r"held by process [0-9]+: another task of this node is runn"):
            ipvs_saving.change(kernel, task(kernel, 1), path)
        assert kernel.servers == {} and not Path(path).exists()
        assert ipvs_saving.predict(kernel, task(kernel, 1), path, {})
        ipvs_saving.change(kernel, task(kernel, 1), "")
    assert list(kernel.servers) == [WEB] and not Path(path).exists()
