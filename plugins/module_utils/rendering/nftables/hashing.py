# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The choice of ServicePorts that are hashed, and of the endpoint that a client of theirs reaches.

The policy of a Service names schedulers of IPVS. Those that hash the source, Maglev (mh) and source hashing (sh), are
both stable hashing here.
"""

from __future__ import annotations

from typing import Sequence

from ...base import ipvs_schedulers
from ...base.addresses import packed
from ...serviceports.info import Endpoint, ServicePortInfo
from ..rendering import NO_SLOW_START
from ..settings import DataplaneSettings
from .slots import MOST_ENDPOINTS, assigned, slot_of

SCHEDULERS = frozenset(name for name, scheduler in ipvs_schedulers.SCHEDULERS.items() if scheduler.hashes)
#: The feature of the kernel that it needs, by its name in ``DataplaneSettings.schedulers``.
JHASH = "jhash"
#: The most addresses and node ports of a hashed ServicePort; each has its own slots.
MOST_FRONTENDS = 16
#: The most lists of slots in a table, one for each address and node port that is hashed (see :func:`slot_lists`), in
#: 1.2 million elements; those of two families fit into the memory limit of the agent beside a large cluster.
#: docs/service-policy.md has the memory and the seconds that these take. All nodes need the same limit, so it is not
#: configurable.
MOST_LISTS = 2_000
#: The most lists of one Service, which may change together: with two families within a second.
MOST_LISTS_OF_SERVICE = 64


def requested(info: ServicePortInfo) -> frozenset[str]:
    """Return the features of the kernel that a ServicePort requests: JHASH, or none."""
    return frozenset((JHASH,)) if info.policy.scheduler in SCHEDULERS and not _refusal(info) else frozenset()


def is_hashed(info: ServicePortInfo, settings: DataplaneSettings) -> bool:
    """Return whether the client determines the endpoint of a ServicePort."""
    return JHASH in settings.schedulers and bool(requested(info))


def ignored(info: ServicePortInfo, settings: DataplaneSettings) -> list[str]:
    """Return one clause for each part of a policy with one of SCHEDULERS that is not supported."""
    scheduler = info.policy.scheduler
    reason = _refusal(info)
    if not reason and JHASH not in settings.schedulers:
        reason = "this kernel has no jhash of nf_tables (CONFIG_NFT_HASH)"
    if reason:
        return [f"scheduler {scheduler} is not used: {reason}"]
    found = [NO_SLOW_START] if info.policy.slow_start else []
    flags = ipvs_schedulers.SCHEDULER_FLAGS
    unknown = [name for name in info.policy.scheduler_flags if flags[name].scheduler not in ("", scheduler)]
    return found + [f"scheduler {scheduler} has no flag {name}" for name in sorted(unknown)]


def slot_lists(info: ServicePortInfo) -> int:
    """Return the maximum number of lists of slots of a ServicePort, without its endpoints, which differ by node."""
    if info.policy.scheduler not in SCHEDULERS or _refusal_of_service(info):
        return 0
    external = _frontends(info) - 1
    return 1 + external * (2 if info.external_local else 1)


def _frontends(info: ServicePortInfo) -> int:
    return len({info.cluster_ip, *info.external_ips, *info.load_balancer_ips}) + bool(info.node_port)


def _refusal(info: ServicePortInfo) -> str:
    if len(info.reachable) > MOST_ENDPOINTS:
        return f"there are {len(info.reachable)} endpoints, but at most {MOST_ENDPOINTS} can be hashed"
    return _refusal_of_service(info)


def _refusal_of_service(info: ServicePortInfo) -> str:
    if info.affinity_seconds:
        return "sessionAffinity ClientIP has precedence"
    frontends = _frontends(info)
    if frontends > MOST_FRONTENDS:
        return f"there are {frontends} addresses and node ports, but at most {MOST_FRONTENDS} can be hashed"
    return ""


def by_port(info: ServicePortInfo) -> bool:
    """Return whether the client's port is hashed, too."""
    flags = [ipvs_schedulers.SCHEDULER_FLAGS[name] for name in info.policy.scheduler_flags]
    owners = ("", info.policy.scheduler)
    return any(flag.bit == ipvs_schedulers.WITH_PORT and flag.scheduler in owners for flag in flags)


def slots_of(endpoints: Sequence[Endpoint]) -> tuple[int, ...]:
    """Return for each slot the position of its endpoint. None of the weights is 0.

    The age of endpoints has no effect, because nodes see it differently: there is no slow start.
    """
    return assigned(tuple([(endpoint.text, endpoint.weight) for endpoint in endpoints]))


def endpoint_of(info: ServicePortInfo, endpoints: Sequence[Endpoint], source: str, port: int = 0) -> Endpoint:
    """Return the endpoint that a client reaches: an address of the family, and its port if :func:`by_port`."""
    registers = packed(source) or b""
    if by_port(info):
        registers += port.to_bytes(2, "big") + b"\x00\x00"
    return endpoints[slots_of(endpoints)[slot_of(registers)]]
