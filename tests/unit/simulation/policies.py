# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network policies of the simulated node: objects that change, and what packets may meet in the tables."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Optional
from unittest import mock

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies.policy import PolicySync
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.packed import text_in
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import NetworkPolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence import policy as convergence
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.pod_links import PodLink, PodLinks
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.elements import desired_table
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.unit.transitions.check import described
from tests.unit.transitions.policies import BRIDGE, NODE, OWN, SENT, State, Verdicts, joined, loaded, states, verdicts

from .kernel import SimulatedKernel
from .server import ApiServer, key_of

KINDS = ("Pod", "Namespace", "NetworkPolicy", "ClusterNetworkPolicy")
ADDRESSES = (("eth0", NODE),)
#: What a terminating namespace has lost stays in force, for as long as the process lives.
_STATES = [each for each in states() if each.namespace != "terminating"]


class Known(NamedTuple):
    """What a table is made of. ``objects``: as texts; none are known, and there is no table, where it is None."""

    objects: Optional[frozenset[str]]
    settings: NetworkPolicySettings = NetworkPolicySettings()


class _Ports(PodLinks):
    """What the kernel says of the interfaces of pods: which port of the bridge leads to an address never changes."""

    def find(self, addresses: Iterable[str]) -> dict[str, PodLink]:
        self.ports = {(number, f"port-{name}"): False for number, name in enumerate("ab", 11)}
        return {each: PodLink(BRIDGE, 2, True, list(self.ports)[OWN.index(each)]) for each in addresses}


def find_links(policy: NodePolicy, settings: NetworkPolicySettings, _links: Any = None) -> None:
    """Take the place of the function that finds the interfaces of pods."""
    with mock.patch.object(convergence, "_judges_frames", lambda: True):
        convergence.find_links(policy, settings, _Ports())


@lru_cache(maxsize=20_000)
def desired(known: Known) -> Mapping[Any, Any]:
    """Return what a run of the program that knows these objects would make."""
    if known.objects is None:
        return {}
    objects = [json.loads(text) for text in known.objects]
    policy = convergence.node_policy(ClusterState.from_objects(objects), known.settings, "node1", ADDRESSES)
    find_links(policy, known.settings)
    return desired_table(policy.table.rows, convergence.policy_options(known.settings))


@lru_cache(maxsize=20_000)
def _steady(known: Known) -> Verdicts:
    return verdicts(loaded(desired(known)))


def changes(server: ApiServer, chosen: random.Random) -> list[Callable[[], None]]:
    """Return the changes after which pods, policies and the namespace are in another state, in any order."""
    state: State = chosen.choice(_STATES)
    wanted = list(state.objects().values())
    kept = {key_of(item) for item in wanted}
    found: list[Callable[[], None]] = [lambda item=item: server.put(item) for item in wanted]  # type: ignore[misc]
    for key in sorted(server.objects):
        if key[0] in KINDS and key not in kept:
            found.append(lambda key=key: server.delete(key))  # type: ignore[misc]
    chosen.shuffle(found)
    return found


class PolicyJudge:
    """Judges packets after each transaction of the tables of policies: they fare as in a state that was known.

    ``sync``: that of the process that runs now. ``faults``, ``judged``, ``excepted``: as those of :class:`.Judge`.
    """

    def __init__(self, kernel: SimulatedKernel) -> None:
        self.faults: list[str] = []
        self.judged = self.excepted = 0
        self.where: Callable[[], str] = str
        self.sync: Optional[PolicySync] = None
        self._kernel = kernel
        self._allowed: set[Known] = {Known(None)}

    def follow(self, sync: PolicySync) -> None:
        """Judge the syncs of a process."""
        self.sync, original = sync, sync.sync

        def synced(addresses: Any) -> None:
            original(addresses)
            policy = sync._policy
            if sync.in_force and policy is not None and not policy.pending and not sync._view.state.policy.changes:
                self._synced(self._known(sync))

        sync.sync = synced  # type: ignore[method-assign]

    def _known(self, sync: PolicySync) -> Known:
        """Return what the process knows now; its table is that of this, and of nothing before it is complete."""
        found = (text_in(packed) for key, packed in sync._view._objects.items() if key.kind in KINDS)
        return Known(frozenset(text.decode() for text in found), sync._settings.effective)

    def _synced(self, known: Known) -> None:
        self._allowed = {known}
        rest = difference(joined(self._kernel.policies), desired(known))
        if not self._kernel.policies_external:
            self.faults += [f"{self.where()}: {line}" for line in described(rest)]
        elif not rest:
            self._kernel.policies_external = False

    def __call__(self) -> None:
        """Judge every packet."""
        sync = self.sync
        if sync is None or not sync._settings.requested.kinds <= sync._view.known:
            self.faults.append(f"{self.where()}: policies change before they are known")
            return
        self._allowed.add(self._known(sync))
        if self._kernel.policies_external:
            self.excepted += len(SENT)
            return
        pending = sync._policy is not None and bool(sync._policy.pending)
        now, ends = verdicts(self._kernel.policies), [_steady(known) for known in self._allowed]
        for packet, verdict, *of_ends in zip(SENT, now, *ends):
            # Grants may follow; until then nothing else is open.
            if verdict not in of_ends and (verdict or not pending):
                self.faults.append(f"{self.where()}: {packet}: {verdict}, expected one of {of_ends}")
        self.judged += len(SENT)

    def last(self, objects: Iterable[dict[str, Any]], settings: NetworkPolicySettings) -> list[str]:
        """Return how the tables differ from those of the objects."""
        wanted = desired(Known(frozenset(json.dumps(item) for item in objects if item["kind"] in KINDS), settings))
        return [f"policies, {line}" for line in described(difference(joined(self._kernel.policies), wanted))]
