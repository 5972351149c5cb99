# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The scheduler, its flags and the persistence of a ServicePort's virtual servers.

They are the node's, as kube-proxy 1.36 sets them, unless annotations of the Service request others, or the weights of
endpoints differ, which some schedulers ignore. Flags of schedulers share bits; their names are those of ipvsadm
(linux/ip_vs.h).
"""

from __future__ import annotations

from typing import AbstractSet, NamedTuple

from ...base.addresses import IPV6
from ...base.ipvs_schedulers import FALLBACK, SCHEDULER_FLAGS, WITH_PORT, scheduler_of
from ...serviceports.info import ServicePortInfo
from ..rendering import NO_SLOW_START
from .model import PERSISTENT, VirtualServer, host_prefix

#: The choice at random that nftables and iptables mode make, which IPVS does not have.
_RANDOM = "random"


class Scheduling(NamedTuple):
    """The settings of a virtual server, and one clause for each part of the policy that they do not follow."""

    server: VirtualServer
    ignored: tuple[str, ...] = ()


def requested_schedulers(info: ServicePortInfo, default: str) -> frozenset[str]:
    """Return the schedulers, other than the node's, of which the kernel must have one for this ServicePort."""
    wanted = info.policy.scheduler
    if wanted in ("", _RANDOM):
        wanted = default
    found = {wanted, _for_different_weights(wanted)} if info.weighted else {wanted}
    if wanted != default and info.weighted:
        # In case the kernel lacks the requested scheduler.
        found.add(_for_different_weights(default))
    return frozenset(found - {default})


def schedule(info: ServicePortInfo, default: str, usable: AbstractSet[str], *, falls_back: bool = False) -> Scheduling:
    """Return the settings of a ServicePort's virtual servers; affinity is persistence.

    ``default``: the node's scheduler. ``usable``: other schedulers that the kernel has. ``falls_back``: set the
    flag by which a hashing scheduler skips real servers of weight 0 instead of refusing their clients.
    """
    policy, family = info.policy, info.family
    ignored = list(policy.problems)
    scheduler = default
    if policy.scheduler in usable:
        scheduler = policy.scheduler
    elif policy.scheduler not in ("", default):
        lacks = "IPVS" if policy.scheduler == _RANDOM else "this kernel"
        ignored.append(f"{lacks} has no scheduler {policy.scheduler}; the node's ({default}) is used")
    own = scheduler
    if info.weighted:
        scheduler = _for_weights(own, usable | {default}, ignored)
    if policy.scheduler == own or (policy.scheduler_flags and not policy.scheduler):
        flags = _flags(policy.scheduler_flags, scheduler, ignored)
    else:
        flags = scheduler_of(scheduler).node_flags
    if scheduler_of(scheduler).hashes:
        flags |= FALLBACK if falls_back else 0
        if policy.slow_start:
            ignored.append(NO_SLOW_START)
    netmask = (policy.persistence_v6 if family == IPV6 else policy.persistence_v4) or host_prefix(family)
    if info.affinity_seconds:
        flags |= PERSISTENT
    elif netmask != host_prefix(family):
        ignored.append("a persistence netmask needs sessionAffinity ClientIP")
        netmask = host_prefix(family)
    return Scheduling(VirtualServer(scheduler, flags, info.affinity_seconds, netmask), tuple(ignored))


def hashed_by(server: VirtualServer) -> str:
    """Return which part of a client determines its real server: ``address``, ``address and port``, or nothing."""
    if not scheduler_of(server.scheduler).hashes:
        return ""
    return "address and port" if server.flags & WITH_PORT else "address"


def _for_different_weights(scheduler: str) -> str:
    return scheduler_of(scheduler).for_weights or scheduler


def _for_weights(scheduler: str, usable: AbstractSet[str], ignored: list[str]) -> str:
    """Return the counterpart of a scheduler that heeds the weights of endpoints; add to ``ignored`` if it has none."""
    weighted = _for_different_weights(scheduler)
    if weighted not in usable:
        ignored.append(f"the weights of endpoints need the scheduler {weighted}, which this kernel does not have")
        return scheduler
    if not scheduler_of(weighted).for_weights:
        ignored.append(f"scheduler {weighted} ignores the weights of endpoints")
    return weighted


def _flags(names: tuple[str, ...], scheduler: str, ignored: list[str]) -> int:
    """Return the bits of the flags that the scheduler has; add the others to ``ignored``."""
    bits = 0
    for name in names:
        flag = SCHEDULER_FLAGS[name]
        if flag.scheduler in ("", scheduler):
            bits |= flag.bit
        else:
            ignored.append(f"scheduler {scheduler} has no flag {name}")
    return bits
