# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a saved state would serve now: its age, and its endpoints that the cluster no longer has.

The node knows the cluster from its running agent. Without one, it knows it from the copy that the agent has kept on
disk, or from the snapshot of the last convergence, whichever is newer; and static Services from their manifests.
"""

from __future__ import annotations

import calendar
import os
import re
import time
from typing import Any, Iterable, Iterator, NamedTuple, Optional

from ..base.addresses import address_and_port, canonical_address, split_port, unpacked
from ..base.errors import HistoryError, ProxyError, SnapshotError
from ..base.regular_files import parse_json
from ..base.timestamps import TIMESTAMP
from ..cluster.files.cache import open_cache
from ..cluster.files.snapshot import snapshot_objects
from ..cluster.files.static import StaticDirectory
from ..configuration.node_proxy import STATIC_SERVICES
from ..convergence.runtime.agent_client import ENDPOINTS, ask_agent
from ..convergence.runtime.state_directory import DEFAULT_CACHE, DEFAULT_CONTROL
from ..kernel.netlink.attributes import parse_attributes
from ..kernel.nftables.attributes import NFTA_SET_DATA_TYPE, NFTA_SET_ELEM_DATA
from ..kernel.nftables.decoding import parse_data
from ..kernel.nftables.messages import type_number
from ..kernel.nftables.raw.reading import RawChain, RawSet, RawTable
from ..rendering.nftables.objects import ADDRESS_TYPES, PORT
from .form import StateRecord
from .state import NodeState

#: The snapshot of the role service_proxy.
SNAPSHOT = "/var/lib/kubenode-proxy/snapshot.json.gz"
#: More lost endpoints than this percentage are refused.
MOST_LOST_PERCENT = 50
_KIND = "EndpointSlice"
_DNAT = re.compile(r"--to-destination (\S+)")
# The types of data of maps to an address and a port, whichever program made them; and kube-proxy's chains.
_TARGETS = frozenset(type_number((address, PORT)).to_bytes(4, "big") for address in ADDRESS_TYPES.values())
_CHAIN = re.compile(r"endpoint-.*__(?P<address>[^/]+)/(?P<port>\d+)\Z")


class Sources(NamedTuple):
    """The agent's socket, and files with what the cluster has; those that do not exist are ignored."""

    cache: str = DEFAULT_CACHE
    snapshot: str = SNAPSHOT
    static: str = STATIC_SERVICES
    control: str = DEFAULT_CONTROL


_SOURCES = Sources()


def endpoints_of(state: NodeState) -> frozenset[str]:
    """Return the endpoints that a state forwards to, as ``ip:port``."""
    found: set[str] = {target for rule in state.rules() for target in _DNAT.findall(rule)}
    found.update(address_and_port(key.ip, key.port) for key in state.real_servers)
    for table in state.nftables.values():
        found.update(_in_nftables(table))
    return frozenset(found)


def _in_nftables(table: RawTable) -> Iterator[str]:
    """Yield the data of all maps to an address and a port, and the endpoints that kube-proxy names chains after."""
    for key, value in table.items():
        if isinstance(value, RawSet):
            definition = memoryview(value.definition)
            data_type = parse_attributes(definition, 0, len(definition)).get(NFTA_SET_DATA_TYPE, b"")
            for element in value.elements if bytes(data_type) in _TARGETS else ():
                data = parse_data(parse_attributes(memoryview(element), 0, len(element))[NFTA_SET_ELEM_DATA])
                # The port is padded to a register.
                yield address_and_port(unpacked(data[:-4]), int.from_bytes(data[-4:-2], "big"))
        elif isinstance(value, RawChain):
            chain = _CHAIN.match(key.name)
            # kube-proxy writes the colons of IPv6 addresses as dots.
            written = (chain["address"], chain["address"].replace(".", ":")) if chain else ()
            address = next(filter(None, map(canonical_address, written)), None)
            if chain and address:
                yield address_and_port(address, int(chain["port"]))


def _addresses(slices: Iterable[Any]) -> Iterator[str]:
    """Yield the addresses of raw EndpointSlices, except of endpoints that terminate.

    Parts that are not as the API server makes them have none.
    """
    for raw in slices:
        endpoints = raw.get("endpoints") if isinstance(raw, dict) and raw.get("kind") == _KIND else None
        for endpoint in endpoints if isinstance(endpoints, list) else ():
            found = endpoint.get("addresses") if isinstance(endpoint, dict) and not _terminates(endpoint) else None
            for address in found if isinstance(found, list) else ():
                canonical = canonical_address(address) if isinstance(address, str) else None
                if canonical:
                    yield canonical


def _terminates(endpoint: dict[str, Any]) -> bool:
    conditions = endpoint.get("conditions")
    return isinstance(conditions, dict) and conditions.get("terminating") is True


def known_addresses(sources: Sources) -> Optional[frozenset[str]]:
    """Return the addresses of all endpoints of the cluster and of static Services that do not terminate.

    Return None if there is neither an agent that knows the cluster nor a file that has it. The file of a running agent
    may be half a minute old, in which a drain moves every pod. Raises SnapshotError if the newest file cannot be used.
    """
    try:
        return frozenset(map(str, ask_agent(sources.control, {"command": ENDPOINTS})["addresses"]))
    except (ProxyError, KeyError, TypeError):
        # No agent runs, it is too busy to answer, it does not know the cluster, or another version has no such answer.
        return _kept_addresses(sources)


def _kept_addresses(sources: Sources) -> Optional[frozenset[str]]:
    """Return the addresses in the files; None if no file has the cluster. Raises SnapshotError."""
    files = {path: os.stat(path).st_mtime for path in (sources.cache, sources.snapshot) if os.path.isfile(path)}
    if not files:
        return None
    newest = max(files, key=files.__getitem__)
    if newest == sources.cache:
        slices: Iterable[Any] = map(parse_json, open_cache(newest).texts_of(lambda key: key.kind == _KIND, {_KIND}))
    else:
        slices = snapshot_objects(newest)
    static = StaticDirectory(sources.static).read().slices.values()
    own = (each for named in static for item in named.values() for each in item.endpoints)
    return frozenset(_addresses(slices)).union(each.address for each in own)


def _age(created: str) -> str:
    try:
        seconds = time.time() - calendar.timegm(time.strptime(created, TIMESTAMP))
    except ValueError:
        return f"of {created}"
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit} old"
    return f"{max(seconds, 0):.0f} seconds old"


def judge_state(record: StateRecord, accept_loss: bool, sources: Sources = _SOURCES) -> tuple[str, ...]:
    """Return warnings about what the node would serve with a state.

    Raises HistoryError for a state that serves nothing, or of whose endpoints most are lost, unless ``accept_loss``.
    """
    if record.state.policies_standalone:
        return ()
    endpoints, name = endpoints_of(record.state), f"state {record.number} is {_age(record.created)}"
    problem = ""
    warnings: tuple[str, ...] = ()
    if not record.state.mode():
        problem = f"{name}: nothing was programmed in it, so the node would serve no Service"
    elif endpoints:
        try:
            known = known_addresses(sources)
        except SnapshotError as error:
            return (f"{name}; whether its endpoints still exist is not known: {error}",)
        lost = [] if known is None else [item for item in endpoints if (split_port(item, 0) or ("",))[0] not in known]
        if lost:
            plural = "do" if len(lost) > 1 else "does"
            text = f"{name}; {len(lost)} of its {len(endpoints)} endpoints {plural} not exist any more"
            if len(lost) * 100 > MOST_LOST_PERCENT * len(endpoints):
                problem = text
            warnings = (text,)
    if problem and not accept_loss:
        raise HistoryError(f"{problem}: if that is what you want, set accept_loss (playbook: rollback_accept_loss)")
    return (problem,) if problem else warnings
