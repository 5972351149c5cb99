# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rollbacks to a saved state in all modes, with what packets meet after each step."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Optional
from unittest import mock

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages.chains import chain_ownership
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.raw.reading import RawSet
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.saved import SavedChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import DEVICE
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import ElementKey, ObjectKey
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import (
    Change,
    Kind,
    Resource,
    Stage,
    UnloadedResource,
    apply_plan,
    plan,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import stages
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.state import ChainsState, NodeState

from .iptables import Programs, variant_of
from .ipvs import MODES, Contents, Kernel
from .ipvs_packets import Check
from .nftables import HOOKS, Table
from .states import Node, State


def raw_table(table: Table) -> dict[Any, Any]:
    """Return a table object by object, as a saved state has it; elements are pairs in place of bytes."""
    found: dict[Any, Any] = {}
    elements: dict[str, list[Any]] = {}
    for key, value in table.observed().items():
        if isinstance(key, ElementKey):
            elements.setdefault(key.name, []).append((key, value))
        else:
            found[key] = value
    for name in table.sets:
        key = ObjectKey("set", name)
        found[key] = RawSet(found[key], tuple(sorted(elements.get(name, []))))
    return found


def table_of(raw: dict[Any, Any]) -> Table:
    """Return the table that these objects make."""
    found: dict[Any, Any] = {}
    for key, value in raw.items():
        found[key] = value.definition if isinstance(value, RawSet) else value
        found.update(value.elements if isinstance(value, RawSet) else ())
    return Table(found)


class RawTable(Resource[Any, Any]):
    """A table of the kernel as uninterpreted objects, all of which change in one transaction."""

    kind = Kind.TABLE_OBJECTS
    atomic = True

    def __init__(self, kernel: Kernel, part: str, family: str) -> None:
        self.family, self._kernel, self._part = family, kernel, part

    def observe(self) -> dict[Any, Any]:
        return raw_table(getattr(self._kernel.held, self._part)) if self.family == self._kernel.family else {}

    def apply(self, change: Change[Any, Any]) -> None:
        kept = {key: value for key, value in self.observe().items() if key not in change.removed}
        made = table_of({**kept, **change.new_values()})
        # The transaction removes the whole table first.
        for table in (getattr(self._kernel.held, self._part), made):
            made.changed |= {HOOKS, *(("chain", name, b"") for name in table.chains)}
            made.changed |= {("element", name, key) for name, elements in table.elements.items() for key in elements}
        self._kernel.step(**{self._part: made})

    def describe(self, key: Any, value: Any) -> list[str]:
        return [str(key)]


def chains_of(node: Node, variant: str, state: Optional[ChainsState]) -> SavedChainsResource:
    saved = (state.chains, state.places) if state is not None else ()
    return SavedChainsResource(variant_of(node.family, variant), chain_ownership(node.settings(), True), *saved)


def saved_state(held: Contents, node: Node, variant: str, has_device: bool) -> NodeState:
    """Return the state in which a node is."""
    programs = Programs(held.chains)
    with programs.used():
        chains = chains_of(node, variant, None)
        observed = chains.observe()
    return NodeState(
        chains=(ChainsState(node.family, variant, chains.places, observed),),
        nftables={node.family: raw_table(held.services)},
        ipvs_tables={node.family: raw_table(held.table)},
        network_policy={},
        sets=held.sets,
        set_elements=held.elements,
        virtual_servers=held.servers,
        real_servers=held.real_servers,
        addresses=held.addresses,
        devices={DEVICE: "dummy"} if has_device else {},
    )


class Rollback(Check):
    """Returns to the new state of a change as it was saved, in place of a convergence to it."""

    @property
    def leaves(self) -> bool:
        """See the base class; the table beside IPVS changes at once, and before the addresses."""
        return super().leaves or self.mode == "nftables"

    def _apply(self, kernel: Kernel, state: Optional[State], node: Node, mode: str, faulty: bool = False) -> None:
        if not faulty:
            super()._apply(kernel, state, node, mode)
            return
        has_device = bool(mode) and MODES[mode].subsystems.ipvs
        saved = saved_state(self.loaded(state, node, mode), node, self._variant, has_device)
        with kernel.used(), self._restored(kernel, node):
            first, _warnings = stages.restore_stages(saved, kernel.handles(), False, to_end=False)
            apply_plan(self._prepare(plan(first)), removals=False)
            rest, _warnings = stages.restore_stages(saved, kernel.handles(), False)
            apply_plan(self._prepare(plan(rest)))

    @contextlib.contextmanager
    def _restored(self, kernel: Kernel, node: Node) -> Iterator[None]:
        """Let the stages of a rollback use a kernel, without what is not simulated."""
        nothing = UnloadedResource("nothing", "", lambda *_entry: [])

        def unread(*_arguments: Any) -> Any:
            return nothing

        def chains(states: Any) -> list[SavedChainsResource]:
            return [chains_of(node, self._variant, each) for each in states]

        with mock.patch.multiple(
            stages,
            RawTableResource=lambda family: RawTable(kernel, "services", family),
            RawIpvsTableResource=lambda family: RawTable(kernel, "table", family),
            RawPolicyTableResource=unread,
            DummyDeviceResource=unread,
            EmptyTablesResource=unread,
            chains_resources=chains,
            userspace_removal_stages=lambda _handles: [],
            _sysctl_stage=lambda _state: (Stage(nothing, {}), []),
        ):
            yield
