# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of the cluster from the first API server that answers, for commands that work without an agent.

The servers are those that the agent would use: that of the kubeconfig, those of the configuration, and those that the
cluster has named to the agent, which keeps them in its cache.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Iterator, NamedTuple, Sequence

from ..base.errors import ApiError, SnapshotError
from ..cluster.api.access import servers
from ..cluster.api.client import ApiClient, list_objects
from ..cluster.api.connection import resolve
from ..cluster.api.errors import concerns_server
from ..cluster.api.resource_types import ResourceType
from ..cluster.api_addresses import KUBERNETES
from ..cluster.files.cache import read_cache
from ..cluster.state import ClusterState
from ..configuration.node_proxy import ApiServerSettings


class Sources(NamedTuple):
    """The places that name API servers. ``kubeconfig``: empty for the default. ``cache``: the agent's file."""

    kubeconfig: str
    settings: ApiServerSettings
    cache: str

    @property
    def several(self) -> bool:
        """Whether servers other than the kubeconfig's may be used."""
        return bool(self.settings.alternatives) or (self.settings.discover and os.path.exists(self.cache))


def read_objects(sources: Sources, others: Sequence[ResourceType]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the objects of the cluster, and a warning for each server that failed before one answered.

    ``others``: collections to read beside those of Services. Raises ApiError, with the failures of all servers if none
    answers, and ConfigurationError.
    """
    failures: list[str] = []
    tried: set[str] = set()
    for candidate in _candidates(sources):
        connection = candidate.connection(sources.kubeconfig or None)
        server = resolve(connection).server
        if server in tried:
            continue
        tried.add(server)
        try:
            if sources.several:
                with contextlib.closing(
                    ApiClient(connection, servers.ANSWER_SECONDS, connect_timeout=servers.CONNECT_SECONDS)
                ) as client:
                    client.ready()
            objects = list_objects(connection, others=others)
            return objects, tuple(f"{failure}; using API server {server}" for failure in failures)
        except ApiError as error:
            if not concerns_server(error):
                raise
            failures.append(str(error))
    raise ApiError("; ".join(failures))


def _candidates(sources: Sources) -> Iterator[servers.Candidate]:
    """Yield the servers; the cache, which may be large, is read only if all others have failed."""
    yield servers.Candidate("", servers.KUBECONFIG)
    yield from servers.configured_servers(sources.settings.alternatives)
    if sources.settings.discover:
        with contextlib.suppress(SnapshotError):
            # Without an intact cache, no other servers are known.
            named = [item for item in read_cache(sources.cache) if _is_kubernetes(item)]
            found = ClusterState.from_objects(named).slices_of(KUBERNETES).get(KUBERNETES.name)
            yield from servers.named_servers(found) if found is not None else ()


def _is_kubernetes(item: dict[str, Any]) -> bool:
    metadata = item.get("metadata")
    names = (metadata.get("namespace"), metadata.get("name")) if isinstance(metadata, dict) else ()
    return item.get("kind") == "EndpointSlice" and names == KUBERNETES
