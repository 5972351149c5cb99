# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Probe the cluster IPs of chosen Services from this node, and report which it reaches.

Only ports whose protocol gives an answer are probed: TCP by a connection (with a TLS handshake if the port is named
``https``, since in userspace mode the node itself accepts the connection) and UDP port 53 by a DNS query.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

from ...base.errors import ConfigurationError
from ...cluster.model import NamespacedName
from ...cluster.state import ClusterState
from ...serviceports.info import ServicePortInfo
from ..family import FamilyServices
from .probe import API_SERVER, DEFAULT_NAME, Probe, ProbeResult, default_services

_DNS_PORT = 53


class Target(NamedTuple):
    """A Service to probe, as namespace/name, and its probes; without any, ``reason`` says why."""

    service: str
    probes: tuple[Probe, ...] = ()
    reason: str = ""


class Reach(NamedTuple):
    """Whether this node reaches a Service.

    ``reached``: all probes succeeded; None if there was nothing to probe. ``reason``: the first failure, or why there
    was nothing to probe; else empty.
    """

    service: str
    reached: Optional[bool]
    reason: str
    probes: tuple[ProbeResult, ...] = ()


def _service_key(name: str) -> NamespacedName:
    namespace, _slash, own = name.partition("/")
    if not namespace or not own or "/" in own:
        raise ConfigurationError(f"traffic_services: {name!r} is not of the form NAMESPACE/NAME")
    return NamespacedName(namespace, own)


def chosen_services(cluster: ClusterState, names: Sequence[str]) -> tuple[NamespacedName, ...]:
    """Return the Services of these names, each NAMESPACE/NAME; without names the API server and the cluster's DNS.

    Raises ConfigurationError for a name that has another form, or that no Service with a cluster IP has.
    """
    if not names:
        return default_services(cluster)
    keys = tuple(dict.fromkeys(map(_service_key, names)))
    for key in keys:
        if key not in cluster.services:
            raise ConfigurationError(f"traffic_services: the cluster has no Service {key} with a cluster IP")
    return keys


def _probe(info: ServicePortInfo) -> Optional[Probe]:
    """Return the probe of one port, None if it cannot be probed."""
    if info.key.protocol == "TCP":
        encrypted = info.key.port_name == "https" or info.key.service == API_SERVER
        return Probe("tls" if encrypted else "tcp", info.cluster_ip, info.port)
    if info.key.protocol == "UDP" and info.port == _DNS_PORT:
        return Probe("dns", info.cluster_ip, info.port, DEFAULT_NAME)
    return None


def _target(key: NamespacedName, ports: Sequence[ServicePortInfo]) -> Target:
    if not ports:
        return Target(str(key), reason="this host does not serve it")
    able = [(info, probe) for info in ports for probe in (_probe(info),) if probe is not None]
    if not able:
        return Target(str(key), reason="it has no port that can be probed, only UDP or SCTP")
    # No proxy can make a port without an endpoint answer.
    probes = tuple(probe for info, probe in able if (info.local if info.internal_local else info.cluster))
    if probes:
        return Target(str(key), probes)
    local = any(info.internal_local and info.endpoints for info, _probe in able)
    return Target(str(key), reason="it has no endpoint on this host" if local else "it has no ready endpoint")


def traffic_targets(keys: Sequence[NamespacedName], families: Sequence[FamilyServices]) -> tuple[Target, ...]:
    """Return what to probe of each Service, in all families that the node serves."""
    ports: dict[NamespacedName, list[ServicePortInfo]] = {key: [] for key in keys}
    for item in families:
        for name, info in item.service_ports.items():
            if name.service in ports:
                ports[name.service].append(info)
    return tuple(_target(key, found) for key, found in ports.items())


def probe_targets(targets: Sequence[Target], seconds: float) -> tuple[Reach, ...]:
    """Probe all targets at the same time, for at most ``seconds`` (and one attempt each)."""
    # Imported late: few runs probe.
    from .attempts import run_probes

    results = {item.probe: item for item in run_probes([probe for item in targets for probe in item.probes], seconds)}
    found = []
    for target in targets:
        own = tuple(results[probe] for probe in target.probes)
        failed = next((item for item in own if not item.answered), None)
        reason = f"{failed.probe}: {failed.reason}" if failed is not None else target.reason
        found.append(Reach(target.service, failed is None if own else None, reason, own))
    return tuple(found)
