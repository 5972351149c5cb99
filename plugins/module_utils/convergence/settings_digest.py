# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A digest of all settings on which the programmed tables depend, to compare those of two processes.

Settings that only the agent has, such as its addresses for metrics, do not count, nor does what follows from the
cluster.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Mapping, Sequence

from ..cluster.state import ClusterState
from ..configuration.feature_gates import DEFAULTS
from ..configuration.model import KubeProxyConfiguration


def settings_digest(
    configuration: KubeProxyConfiguration,
    filter_backend: str,
    node_name: str,
    families: Sequence[str],
    cluster: ClusterState,
) -> str:
    """Return the digest. ``configuration``: that of the mode in effect; ``filter_backend``: the one of ipvs mode.

    ``cluster``: only its static Services count, which are settings of the node.
    """
    own = configuration.node_proxy
    static = {key: (item, cluster.slices_of(key)) for key, item in cluster.static_services.items()}
    settings = (
        (configuration.mode, filter_backend, node_name, tuple(families)),
        tuple(configuration.gate(name) for name in sorted(DEFAULTS)),
        (configuration.bind_address, configuration.effective_node_port_addresses),
        (configuration.masquerade_mark, configuration.masquerade_all, configuration.masquerade_ports),
        (configuration.detect_local_mode, configuration.detect_local, configuration.cluster_cidrs),
        (configuration.effective_schedulers, configuration.effective_exclude_cidrs),
        configuration.effective_localhost_node_ports,
        (own.behaviour, own.service_policy, own.outside_host, own.network_policy, own.traffic),
        static,
    )
    return hashlib.sha256(json.dumps(_plain(settings)).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value in which the order of sets and mappings does not depend on the process."""
    if isinstance(value, Mapping):
        return sorted(([_plain(key), _plain(item)] for key, item in value.items()), key=json.dumps)
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=json.dumps)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
