# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-proxy's own configuration, in its ConfigMap, and how the configurations of hosts differ from it."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ..cluster.api import ApiClient
from ..cluster.api_errors import FORBIDDEN, ApiStatusError, unless_absent
from ..configuration.comparison import Difference, differences
from ..configuration.documents import check_type, parse_documents
from ..configuration.model import API_VERSION, KIND
from ..errors import ApiError, ConfigurationError

#: Where kubeadm has it; other installers have other names.
KEY = "config.conf"
_NAMED_HOSTS = 3


class ConfigMap(NamedTuple):
    """The ConfigMap of kube-proxy's DaemonSet."""

    namespace: str = "kube-system"
    name: str = "kube-proxy"

    def __str__(self) -> str:
        return f"ConfigMap {self.namespace}/{self.name}"


def read_configuration(client: ApiClient, place: ConfigMap) -> Optional[Mapping[str, Any]]:
    """Return the fields of kube-proxy's configuration; None if there is no such ConfigMap.

    Raises ApiError, and ConfigurationError if the ConfigMap has no KubeProxyConfiguration, or more than one.
    """
    path = f"/api/v1/namespaces/{place.namespace}/configmaps/{place.name}"
    try:
        found = unless_absent(lambda: client.send("GET", path, None, f"get {place}"))
    except ApiStatusError as error:
        if error.code != FORBIDDEN:
            raise
        raise ApiError(f"{error}; permit it, or compare nothing (migrate_configuration=own)") from error
    if found is None:
        return None
    data = found.get("data")
    texts = {key: text for key, text in (data if isinstance(data, dict) else {}).items() if isinstance(text, str)}
    keys = [KEY] if KEY in texts else [key for key, text in sorted(texts.items()) if KIND in text]
    if len(keys) != 1:
        problem = f"has no {KIND}" if not keys else f"has several ({', '.join(keys)})"
        raise ConfigurationError(f"{place}: {problem}; its entries are {', '.join(sorted(texts)) or 'empty'}")
    try:
        fields = parse_documents(texts[keys[0]], []).kube_proxy
        check_type(fields, KIND, API_VERSION)
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {keys[0]}: {error}") from error
    return fields


class HostDifferences(NamedTuple):
    """Hosts with the same configuration, and how it differs from kube-proxy's."""

    hosts: Tuple[str, ...]
    differences: List[Difference]

    def text(self, chosen: bool) -> str:
        """Return the fields that the hosts' configuration sets, or those that it does not, in one line; or nothing."""
        fields = "; ".join(str(item) for item in self.differences if item.chosen is chosen)
        more = len(self.hosts) - _NAMED_HOSTS
        named = ", ".join(self.hosts[:_NAMED_HOSTS]) + (f" and {more} more" if more > 0 else "")
        return f"{named}: {fields}" if fields else ""


def compared(theirs: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> List[HostDifferences]:
    """Return how hosts differ from kube-proxy's configuration. ``own``: the configuration of each. Raises as below.

    ConfigurationError, which names a host, for a configuration that is not valid.
    """
    hosts: Dict[str, List[str]] = {}
    for host, configuration in own.items():
        hosts.setdefault(json.dumps(configuration, sort_keys=True), []).append(host)
    found = []
    for names in hosts.values():
        try:
            found.append(HostDifferences(tuple(names), differences(theirs, own[names[0]])))
        except ConfigurationError as error:
            raise ConfigurationError(f"{names[0]}: {error}") from error
    return found
