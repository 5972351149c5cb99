# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated kernel of ipvs mode is as the real one after each message, commit and transaction.

With the filter backend nftables it needs nf_tables with NAT, which user-mode Linux lacks and QEMU has.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any, Callable, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.handles import KernelHandles
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages.ipvs_filter_backend import (
    set_resources,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.servers import (
    RealServersResource,
    VirtualServersResource,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.outcomes import MessageError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.rtnetlink.links import AddressesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import restore
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import parse_save
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import apply_plan, plan
from tests.kernel.test_simulated_kernel import BothPrograms
from tests.lab.system import ip_batch
from tests.unit.transitions.ipvs import Contents, Kernel, stages
from tests.unit.transitions.ipvs_packets import Check
from tests.unit.transitions.states import NETS, Node, random_changes

_SAVE, _RESTORE = restore.save, restore.restore


class Both:
    """A simulated kernel beside the real one, which gets the same messages. ``states``, ``refused``: how many."""

    def __init__(self, name: str, family: str, handles: KernelHandles) -> None:
        self.name, self.family, self.handles = name, family, handles
        self.kernel = Kernel(Contents(), family=family)
        self.kernel.mirror = self._send
        self.states = self.refused = 0
        tables: list[Any] = [VirtualServersResource(handles.ipvs, family), RealServersResource(handles.ipvs, family)]
        tables.append(AddressesResource(handles.route, family))
        if name == "iptables":
            tables += set_resources(handles, family)
            self.variant = detect_variant(family, "legacy")
            self.programs = BothPrograms(self.variant, lambda _held: None)
        else:
            self.table: Any = handles.ipvs_table(family)
        self.tables = tables

    def _send(self, part: str, sent: Any, refused: Sequence[MessageError]) -> None:
        """Send what the simulated kernel has taken or refused to the real one; both must then hold the same."""
        errors: list[Any] = []
        if part == "chains":
            _RESTORE(self.variant, sent)
        elif part == "table":
            self.table._send(sent)
        else:
            sockets: dict[str, Callable[[], Any]] = {
                "servers": lambda: self.handles.ipvs.netlink.transact_ready([_numbered(sent, self.handles)]),
                "sets": lambda: self.handles.ipset.netlink.transact([sent]),
                "addresses": lambda: self.handles.route.transact([sent]),
            }
            errors = [error.errno for error in sockets[part]().errors]
        assert errors == [error.errno for error in refused], (part, sent)
        self.refused += len(errors)
        self.states += 1
        held = self.kernel.held
        expected = [held.servers, held.real_servers, held.addresses, held.sets, held.elements]
        assert [table.observe() for table in self.tables] == expected[: len(self.tables)]
        if part == "chains":
            real = parse_save(_SAVE(self.variant)).chains
            assert self.programs._rules(held.chains) == self.programs._rules(real)
        elif part == "table":
            assert self.table.observe() == held.table.observed()

    def change(self, desired: Any, shuffled: int = 0) -> None:
        """Make a change; ``shuffled``, a seed: its parts in any order, so that the kernel refuses messages."""
        with self.kernel.used():
            planned = plan(stages(self.kernel, Node(self.family), self.name, desired))
            if shuffled:
                random.Random(shuffled).shuffle(planned)
            apply_plan(planned)


def _numbered(message: bytes, handles: KernelHandles) -> bytes:
    """Return a message to IPVS with the number that its family has in the real kernel."""
    return message[:4] + handles.ipvs.family_id.to_bytes(2, "little") + message[6:]


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", NETS)
@pytest.mark.parametrize(
    "name", [pytest.param("iptables", marks=pytest.mark.uml), pytest.param("nftables", marks=pytest.mark.ipvs)]
)
def test_each_step_has_the_same_effect(
    name: str, family: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    # The number of the device is that of the simulated one.
    ip_batch(["link add kube-ipvs0 index 7 type dummy"])
    check = Check(name, Node(family))
    with KernelHandles() as handles:
        both = Both(name, family, handles)
        for number, state in enumerate(itertools.chain(*random_changes(13, count, 2))):
            desired = check.desired(state, Node(family))
            try:
                both.change(desired, number % 4 // 3 * number)
            except KernelError:
                assert number % 4 == 3
            both.change(desired)
    assert both.states > 12 * count and (both.refused or count < 10)
