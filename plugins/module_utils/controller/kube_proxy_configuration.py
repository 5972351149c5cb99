# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-proxy's own configuration, in its ConfigMap, and how the configurations of hosts differ from it."""

from __future__ import annotations

import json
from typing import Any, Mapping, NamedTuple, Optional

from ..base.errors import ApiError, ConfigurationError, errors_as, some_of
from ..cluster.api.client import ApiClient
from ..cluster.api.errors import FORBIDDEN, ApiStatusError, unless_absent
from ..configuration.comparison import Difference, differences
from ..configuration.documents import check_type, parse_documents
from ..configuration.model import API_VERSION, KIND
from .placement import Placement, pod_spec

#: Where kubeadm has it; other installers have other names.
KEY = "config.conf"
_NAMED_HOSTS = 3


class ConfigMap(NamedTuple):
    """A ConfigMap: by default the one that has the name of kube-proxy's DaemonSet."""

    namespace: str = "kube-system"
    name: str = "kube-proxy"

    def __str__(self) -> str:
        return f"ConfigMap {self.namespace}/{self.name}"


class Found(NamedTuple):
    """The fields of kube-proxy's configuration, and where they are."""

    place: ConfigMap
    fields: Mapping[str, Any]


def find_configuration(client: ApiClient, place: ConfigMap) -> Optional[Found]:
    """Return kube-proxy's configuration; None if neither the ConfigMap nor one that the DaemonSet mounts exists.

    Raises ApiError, and ConfigurationError if a ConfigMap has no KubeProxyConfiguration, or more than one.
    """
    data = _data(client, place)
    if data is not None:
        return Found(place, _fields(place, data))
    for name in _mounted(client, place):
        mounted = place._replace(name=name)
        data = _data(client, mounted) or {}
        if any(KIND in text for text in data.values()):
            return Found(mounted, _fields(mounted, data))
    return None


def _get(client: ApiClient, path: str, purpose: str) -> Optional[dict[str, Any]]:
    try:
        return unless_absent(lambda: client.send("GET", path, None, f"get {purpose}"))
    except ApiStatusError as error:
        if error.code != FORBIDDEN:
            raise
        raise ApiError(f"{error}; permit it, or compare nothing (migrate_configuration=own)") from error


def _data(client: ApiClient, place: ConfigMap) -> Optional[dict[str, str]]:
    """Return the texts of a ConfigMap by key; None if it does not exist."""
    found = _get(client, f"/api/v1/namespaces/{place.namespace}/configmaps/{place.name}", str(place))
    if found is None:
        return None
    data = found.get("data")
    return {key: text for key, text in (data if isinstance(data, dict) else {}).items() if isinstance(text, str)}


def _mounted(client: ApiClient, place: ConfigMap) -> list[str]:
    """Return the names of the ConfigMaps that the DaemonSet of that name mounts, as some installers name them."""
    daemon_set = Placement(place.namespace, place.name)
    found = _get(client, daemon_set.path, str(daemon_set))
    volumes = pod_spec(found).get("volumes") if found is not None else None
    names = [(volume.get("configMap") or {}).get("name") for volume in volumes or [] if isinstance(volume, dict)]
    return [name for name in names if isinstance(name, str) and name]


def _fields(place: ConfigMap, texts: Mapping[str, str]) -> Mapping[str, Any]:
    keys = [KEY] if KEY in texts else [key for key, text in sorted(texts.items()) if KIND in text]
    if len(keys) != 1:
        problem = f"has no {KIND}" if not keys else f"has several ({', '.join(keys)})"
        raise ConfigurationError(f"{place}: {problem}; its entries are {', '.join(sorted(texts)) or 'empty'}")
    with errors_as(ConfigurationError, f"{place}: {keys[0]}", ConfigurationError):
        fields = parse_documents(texts[keys[0]], []).kube_proxy
        check_type(fields, KIND, API_VERSION)
    return fields


class HostDifferences(NamedTuple):
    """Hosts with the same configuration, and how it differs from kube-proxy's."""

    hosts: tuple[str, ...]
    differences: list[Difference]

    def text(self, chosen: bool) -> str:
        """Return the fields that the hosts' configuration sets, or those that it does not, in one line; or nothing."""
        fields = "; ".join(str(item) for item in self.differences if item.chosen is chosen)
        return f"{some_of(self.hosts, _NAMED_HOSTS)}: {fields}" if fields else ""


def compared(theirs: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> list[HostDifferences]:
    """Return how hosts differ from kube-proxy's configuration. ``own``: the configuration of each. Raises as below.

    ConfigurationError, which names a host, for a configuration that is not valid.
    """
    hosts: dict[str, list[str]] = {}
    for host, configuration in own.items():
        hosts.setdefault(json.dumps(configuration, sort_keys=True), []).append(host)
    found = []
    for names in hosts.values():
        with errors_as(ConfigurationError, names[0], ConfigurationError):
            found.append(HostDifferences(tuple(names), differences(theirs, own[names[0]])))
    return found
