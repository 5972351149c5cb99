# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel tests run as root, each in a separate network namespace, so that the host's rules are never touched.

Tests marked ``uml`` need a kernel with IPVS: ``make uml`` runs them inside user-mode Linux. ``make debian``
runs those marked ``ipvs`` inside QEMU, beside nf_tables with NAT, and ``make kernel`` the others on the host's kernel.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator, Optional

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.installed import HISTORY_DIRECTORY, STATE_DIRECTORY
from tests.lab import system

#: Where a service proxy of this host would keep its state: no test may write there.
OF_THE_HOST = (Path(HISTORY_DIRECTORY), Path(STATE_DIRECTORY))


def pytest_sessionstart() -> None:
    """Fail at once without root instead of in every test."""
    if os.geteuid() != 0:
        pytest.exit("kernel tests need root: run them with sudo, or run only tests/unit", returncode=2)


def _changes() -> list[Optional[int]]:
    return [path.stat().st_mtime_ns if path.exists() else None for path in OF_THE_HOST]


@pytest.fixture(autouse=True)
def no_state_on_the_host() -> Iterator[None]:
    """Fail if the test has used the directories of this host's own service proxy."""
    before = _changes()
    yield
    assert _changes() == before, f"the test, or one beside it, has written to one of {OF_THE_HOST}"


@pytest.fixture(autouse=True)
def own_network_namespace() -> Iterator[None]:
    """Run the test in a new network namespace and restore the old one afterwards."""
    descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    system.unshare(system.CLONE_NEWNET)
    try:
        system.forget_host_settings()
        system.ip_batch(["link set lo up"])
        yield
    finally:
        system.enter(f"/proc/self/fd/{descriptor}", system.CLONE_NEWNET)
        os.close(descriptor)
