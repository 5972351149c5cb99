# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults that are seeded into the agent, each of which some schedule must show."""

from __future__ import annotations

from typing import Any, Iterator

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.drift.notifications import NftWatch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.drift.watch import Watching
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies.inputs import PolicyLinks
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies.policy import PolicySync
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies.settings import SettingsInEffect
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.node import NodeSync
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.proxier import Proxier
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.syncer import Syncer
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Known
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.reflector import Reflector
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.sync.schedule import Schedule
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Planner, Transaction
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.rows import PolicyRows
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.merged import MergedTables

_pop_journal = MergedTables.pop_journal
_ended = Schedule.ended
_apply = ClusterView.apply
_replace = Known.replace
_poll = NftWatch.poll
_start = Syncer.start
_transactions = Planner.transactions
_pop_rows = PolicyRows.pop_journal
_not_programmed = PolicySync._not_programmed
_links = PolicyLinks.follow


def _journal_without_an_entry(tables: MergedTables) -> Any:
    journal = _pop_journal(tables)
    for rows in journal.values():
        if len(rows) > 1:
            del rows[next(iter(rows))]
            break
    return journal


def _no_list(reflector: Any) -> None:
    reflector._version = reflector._minimum = str(reflector._client._server.version)


def _once_more(view: Any, batch: Any, whole: bool = False) -> Any:
    before, view.before = getattr(view, "before", {}), {**getattr(view, "before", {}), batch.kind: batch}
    effect = _apply(view, batch, whole)
    if batch.kind in before and not before[batch.kind].listed:
        _apply(view, before[batch.kind], whole)
    return effect


def _unless_lost(watch: Any, found: dict[str, str]) -> None:
    if not watch._monitor._overrun:
        _poll(watch, found)
    watch._monitor._overrun = False


def _rebuild(sync: NodeSync, request: Any) -> None:
    sync.set_up(request)
    sync.schedule.request()


def _start_without_the_deleted(syncer: Syncer, proxiers: Any) -> Any:
    syncer.view.pop_dirty()
    syncer._unapplied = set()
    return _start(syncer, proxiers)


def _reversed(planner: Planner, change: Any) -> Iterator[Transaction]:
    yield from list(_transactions(planner, change))[::-1]


def _rows_without_one(rows: PolicyRows) -> Any:
    journal = _pop_rows(rows)
    if len(journal) > 3:
        del journal[sorted(journal, key=repr)[0]]
    return journal


def _without_comparison(sync: PolicySync, error: Exception) -> None:
    _not_programmed(sync, error)
    sync._table.needs_full = False


def _links_once(links: PolicyLinks, policy: Any, settings: Any, everything: bool) -> None:
    if everything:
        _links(links, policy, settings, everything)


def _with_all(known: Known, items: Any) -> Any:
    return _replace(known, items)._replace(gone=[])


#: A seed that shows it, the class, the name of its method, and what is called instead.
FAULTS: dict[str, tuple[int, Any, str, Any]] = {
    "a lost entry of the journal": (2, MergedTables, "pop_journal", _journal_without_an_entry),
    "no list after a gap": (16, Reflector, "_forget_version", _no_list),
    "no repair": (7, Watching, "suspect", lambda _self, _families: None),
    "no other attempt": (6, Schedule, "ended", lambda self, now, _succeeded, pause=0.0: _ended(self, now, True, pause)),
    "an event applied twice": (0, ClusterView, "apply", _once_more),
    "objects kept that a list lacks": (13, Known, "replace", _with_all),
    "lost notifications not noticed": (17, NftWatch, "poll", _unless_lost),
    "a kernel that is not read at the start": (0, Proxier, "full", Proxier.partial),
    "Services not rendered again for a configuration": (0, NodeSync, "rebuild", _rebuild),
    "Services deleted before another attempt": (163, Syncer, "start", _start_without_the_deleted),
    "transactions reversed": (1, Planner, "transactions", _reversed),
    "policies before they are known": (2, SettingsInEffect, "are_known", True),
    "a lost row of policies": (2, PolicyRows, "pop_journal", _rows_without_one),
    "policies not compared after a failure": (23, PolicySync, "_not_programmed", _without_comparison),
    "interfaces of pods not looked for again": (5, PolicyLinks, "follow", _links_once),
}  # fmt: skip
