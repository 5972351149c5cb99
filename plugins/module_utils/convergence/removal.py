# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stages that remove leftovers of modes that are not in effect, or everything that any mode created."""

from __future__ import annotations

from typing import Sequence

from ..base.addresses import FAMILIES
from ..base.errors import KernelError
from ..kernel.xtables.variant import NFT, Survey, chosen_by_kubelet
from ..rendering.iptables.fixed import SERVICES
from ..rendering.ipvs.chains import LOAD_BALANCER_CHAIN
from ..rendering.networkpolicy.sets import ISOLATED, TABLE
from ..rendering.served import served_cluster_ips
from ..rendering.userspace.model import DEVICE
from ..resources import Kind, PlannedChange, Stage
from .family import FamilyContext, removal_contexts
from .handles import KernelHandles
from .modes.mode import Mode
from .modes.stages.chains import chain_removal_stages, iptables_remainder_stages, removable_chains
from .modes.stages.ipvs_filter_backend import device_removal_stages, retiring_stages, unused_filter_backend_stages
from .modes.stages.userspace import userspace_device_removal_stages, userspace_removal_stages


def leftover_contexts(mode: Mode, served: Sequence[FamilyContext]) -> list[FamilyContext]:
    """Return the iptables of each family that may hold chains which ``mode`` does not program.

    ``served``: the node's data for each family in this mode. Where it programs chains, only the other variant of
    iptables may hold any: it was in use before kubelet's chains were in this one, which decide. On a node where another
    program serves the Services, all chains belong to that program.
    """
    if not mode.serves:
        return []
    settings = {item.family: item.settings for item in served}
    used = {(item.family, item.variant.name) for item in served if item.variant is not None}
    found = [item._replace(settings=settings[item.family]) for item in removal_contexts(list(settings))]
    return [item for item in found if item.variant is not None and (item.family, item.variant.name) not in used]


def _readable(handles: KernelHandles, contexts: Sequence[FamilyContext]) -> list[FamilyContext]:
    """Return the contexts whose programs can run: those of iptables-nft fail without nf_tables, and have no chains."""
    return [item for item in contexts if item.variant and (item.variant.name != NFT or handles.has_nftables())]


def leaving_stages(mode: Mode, handles: KernelHandles) -> list[Stage]:
    """Return the stages to apply before :func:`leftover_stages` are planned: see :func:`.retiring_stages`.

    Raises KernelError.
    """
    return retiring_stages(handles) if mode.serves and not mode.subsystems.ipvs else []


def leftover_stages(mode: Mode, handles: KernelHandles, contexts: Sequence[FamilyContext]) -> list[Stage]:
    """Return the stages that remove leftovers of other modes in subsystems that ``mode`` does not use.

    ``contexts``: from :func:`leftover_contexts`. Modes that use iptables share one resource of chains, so the changes
    of one remove the chains that another left. A mode that serves no Services removes nothing of other modes. Raises
    KernelError.
    """
    if not mode.serves:
        return []
    used = mode.subsystems
    stages: list[Stage] = []
    if used.ipvs:
        stages += unused_filter_backend_stages(handles, used.ipsets, used.ipvs_table)
    else:
        stages += ipvs_removal_stages(handles, draining=True)
    stages += chain_removal_stages(_readable(handles, contexts), beside_others=used.chains)
    if not used.nftables:
        stages += nftables_removal_stages(handles)
    if not used.listeners:
        stages += userspace_removal_stages(handles)
    elif used.device != DEVICE:
        stages += userspace_device_removal_stages(handles)
    return stages


def serves(handles: KernelHandles) -> bool:
    """Return whether the node has what serves a Service, of whatever program and mode. Raises KernelError."""
    from .modes.stages.release import serves_by_ipvs

    tables = [handles.nftables(family).observe() for family in FAMILIES] if handles.has_nftables() else []
    chains = [removable_chains(item).observe() for item in removal_contexts()]
    return bool(served_cluster_ips([*tables, *chains])) or serves_by_ipvs(handles)


def superseded_stages(mode: Mode, handles: KernelHandles, restored: str = "") -> list[Stage]:
    """Return the stages that remove what ``mode`` has left on a node whose Services kube-proxy serves by now.

    In the same mode kube-proxy has adopted it, except what it does not use, and what is in another variant of iptables.
    ``restored``: the variant in which this mode has programmed the node, empty if not known: what is in any other one
    may be kube-proxy's. Raises KernelError if kube-proxy does not serve yet, or where that cannot be seen.
    """
    # Imported late: a convergence needs nothing of it.
    from .modes.stages.release import release_stages, serves_by_ipvs

    used, contexts = mode.subsystems, _readable(handles, removal_contexts())
    tables = [handles.nftables(family) for family in FAMILIES] if handles.has_nftables() else []
    if not used.nftables and served_cluster_ips(table.observe() for table in tables):
        return [*ipvs_removal_stages(handles), *chain_removal_stages(contexts)]
    chains = [(item, item.variant.name if item.variant else "", removable_chains(item).observe()) for item in contexts]
    serves = bool(served_cluster_ips(found for _item, _name, found in chains))
    by_ipvs = not used.ipvs and serves_by_ipvs(handles)
    if used.nftables and (serves or by_ipvs):
        return nftables_removal_stages(handles)
    if used.chains and by_ipvs:
        # It has emptied KUBE-SERVICES in its own variant of iptables only.
        theirs = [item for item, _name, found in chains if LOAD_BALANCER_CHAIN in found]
        left = [item for item in contexts if item not in theirs]
        return [*iptables_remainder_stages(theirs, True), *chain_removal_stages(left, beside_others=True)]
    # kube-proxy writes to the variant that kubelet has chosen; at boot, nothing shows which that will be.
    chosen, _chain = chosen_by_kubelet(Survey().saved)
    moved = chosen != restored and any(found.get(SERVICES) for _item, name, found in chains if name == chosen)
    left = [item for item, name, _found in chains if moved and name == restored]
    elsewhere = chain_removal_stages(left, beside_others=True)
    if used.ipvs and serves:
        return [*ipvs_removal_stages(handles), *elsewhere]
    if used.chains and not used.ipvs and not left:
        raise KernelError("kube-proxy in the same mode has the same chains")
    return [*release_stages(handles), *elsewhere]


def nftables_removal_stages(handles: KernelHandles) -> list[Stage]:
    """Return stages that remove the tables of nftables mode; none if nf_tables is not loaded."""
    return [Stage(handles.nftables(family), {}) for family in FAMILIES] if handles.has_nftables() else []


def ipvs_removal_stages(handles: KernelHandles, draining: bool = False) -> list[Stage]:
    """Return stages that remove everything of ipvs mode except chains, in both families.

    With ``draining``, servers with active connections are kept until these end. Raises KernelError.
    """
    if not handles.has_ipvs():
        return device_removal_stages(handles, unused_filter_backend_stages(handles, False, False), {})
    # Imported late: few nodes have IPVS loaded.
    from .modes.stages.ipvs import loaded_ipvs_removal_stages

    return loaded_ipvs_removal_stages(handles, draining)


def server_removal_stages(handles: KernelHandles) -> list[Stage]:
    """Return the stages that remove virtual servers and their addresses, to be applied before :func:`removal_stages`.

    Until then chains and tables masquerade and filter the connections to them. Raises KernelError.
    """
    if not handles.has_ipvs():
        return []
    # Imported late: few nodes have IPVS loaded.
    from .modes.stages.ipvs import loaded_server_removal_stages

    return loaded_server_removal_stages(handles)


def removal_stages(contexts: Sequence[FamilyContext], handles: KernelHandles) -> list[Stage]:
    """Return the stages that remove everything that any mode created, each object after those that refer to it."""
    return [
        *ipvs_removal_stages(handles),
        *chain_removal_stages(contexts),
        *nftables_removal_stages(handles),
        *userspace_removal_stages(handles),
        *policy_removal_stages(handles),
    ]


def ended_isolation(planned: Sequence[PlannedChange]) -> list[str]:
    """Return a line if the plan removes the whole table of network policies, with the number of pods that it opens."""
    for item in planned:
        removed = item.change.removed
        if item.resource.kind != Kind.POLICY_OBJECTS or TABLE.key not in removed:
            continue
        pods: dict[str, set[bytes]] = {}
        for key in removed:
            if key.kind == "element" and key.name.startswith(f"{ISOLATED}-"):
                # A pod has one address of each family, and may be isolated in both directions.
                pods.setdefault(key.name[-1], set()).add(key.key)
        count = max(map(len, pods.values()), default=0)
        if count:
            return [
                f"ends the isolation of {count} {'pod' if count == 1 else 'pods'}: network policies are not enabled"
            ]
    return []


def policy_removal_stages(handles: KernelHandles) -> list[Stage]:
    """Return the stage that removes the table of network policies; none if nf_tables is not loaded."""
    return [Stage(handles.network_policy(), {})] if handles.has_nftables() else []
