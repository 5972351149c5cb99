# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which cluster a node serves, so that the API server of another one never removes what is programmed."""

from __future__ import annotations

from typing import Callable, Dict, Mapping

from ...base.errors import ApiError
from ...cluster.api.client import ApiClient
from ...cluster.api.errors import FORBIDDEN, ApiStatusError
from ...cluster.api.resource_types import SERVICES
from ...cluster.model import NamespacedName, Service
from ...cluster.parsing.objects import ObjectKey
from ...preflight.cluster_state import FIRST_SERVICES, origin_findings, origin_of
from .disk_copy import DiskCopy
from .first_services import usable
from .packed import parsed_items


class Origin:
    """Recognizes the cluster that is served. All threads call :meth:`check`, and the main one :meth:`read` before.

    ``services``: those known now. Before any is known, ``recorded`` identifies the cluster whose Services are
    programmed; after a boot, the copy on disk of ``disk_copy`` has those of an earlier start.
    """

    def __init__(
        self,
        services: Callable[[], Mapping[NamespacedName, Service]],
        disk_copy: DiskCopy,
        recorded: Callable[[], Mapping[NamespacedName, str]],
    ) -> None:
        self._services = services
        self._disk_copy = disk_copy
        self._recorded = recorded
        self._before: Mapping[NamespacedName, str] = {}

    def read(self) -> None:
        """Read the record of what is programmed, or without one the first Services of the copy on disk."""
        self._before = self._recorded() or self._kept()

    def _kept(self) -> Mapping[NamespacedName, str]:
        keys = frozenset(ObjectKey(SERVICES.kind, *name) for name in FIRST_SERVICES)
        values = [parsed.value for parsed, _item in parsed_items(self._disk_copy.earlier(keys))]
        return origin_of({value.key: value for value in values if isinstance(value, Service)})

    def check(self, client: ApiClient) -> None:
        """Raise ApiError if the server is of another cluster, or cannot be asked; one request as a rule."""
        known = origin_of(self._services()) or self._before
        now: Dict[NamespacedName, str] = {}
        for name in filter(known.__contains__, FIRST_SERVICES):
            try:
                path, field = SERVICES.in_namespace(name.namespace), f"metadata.name={name.name}"
                items = client.list(path, field, "0", lambda raw: usable(raw, SERVICES.kind)).items
            except ApiStatusError as error:
                if error.code == FORBIDDEN:
                    # The lists, which follow, report it.
                    return
                raise
            if items:
                now[name] = str(items[0]["metadata"].get("creationTimestamp"))
            if now.get(name) == known[name]:
                return
        for finding in origin_findings(known, now):
            raise ApiError(f"API server {client.host}: {finding} [{finding.name}]")
