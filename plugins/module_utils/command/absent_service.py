# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why no node serves a Service that ``explain`` is about: it does not exist, or it has no address of its own.

The agent does not know such Services, since its lists leave them out. So they are read from the API server, or from the
snapshot that the options name.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any, Iterable

from ..base.errors import ProxyError
from ..cluster.api.client import ApiClient
from ..cluster.api.connection import ApiConnection
from ..cluster.api.resource_types import SERVICES
from ..cluster.fields import shown, suggestion
from ..cluster.files.snapshot import snapshot_objects
from ..cluster.parsing.service import SERVICE_PROXY_NAME_LABEL
from ..configuration.load import load_given

_ANSWER_SECONDS = 5.0
_NAMES = 10
_NOT_SERVED = "no node programs anything for it"


def why_absent(arguments: argparse.Namespace, namespace: str, name: str) -> str:
    """Return a sentence about a Service that this node does not serve."""
    try:
        found = _services(arguments, namespace)
    except ProxyError as error:
        return (
            f"this node serves no Service {namespace}/{name}: it does not exist, or it is headless or an ExternalName, "
            f"for which no node programs anything; the API server cannot be asked: {error}"
        )
    return _sentence(namespace, name, found)


def _services(arguments: argparse.Namespace, namespace: str) -> dict[str, Any]:
    """Return the raw Services of a namespace by name. Raises ProxyError."""
    if arguments.snapshot:
        items: Iterable[Any] = snapshot_objects(arguments.snapshot)
    elif arguments.from_cache:
        raise ProxyError("the options name the cache")
    else:
        kubeconfig = arguments.kubeconfig or load_given(arguments.config).configuration.client_connection.kubeconfig
        connection = ApiConnection(kubeconfig=kubeconfig or None)
        every = SERVICES._replace(label_selector="", field_selector="").in_namespace(namespace)
        with contextlib.closing(ApiClient(connection, _ANSWER_SECONDS)) as client:
            items = [{**item, "kind": "Service"} for item in client.list(every).items]
    return {
        str(item["metadata"]["name"]): item
        for item in items
        if isinstance(item, dict) and item.get("kind") == "Service" and item["metadata"].get("namespace") == namespace
    }


def _sentence(namespace: str, name: str, found: dict[str, Any]) -> str:
    if name not in found:
        known: list[str] = sorted(found)
        names = f"{', '.join(known[:_NAMES])}{', ...' if len(known) > _NAMES else ''}" if known else "none"
        return f"there is no Service {namespace}/{name}{suggestion(name, known)} (namespace {namespace} has {names})"
    spec = found[name].get("spec") or {}
    labels = found[name]["metadata"].get("labels") or {}
    if spec.get("type") == "ExternalName":
        target = shown(spec.get("externalName"))
        return f"{namespace}/{name} is an ExternalName: DNS gives clients the name {target}, and {_NOT_SERVED}"
    if spec.get("clusterIP") == "None":
        return f"{namespace}/{name} is headless: DNS gives clients the addresses of its pods, and {_NOT_SERVED}"
    if SERVICE_PROXY_NAME_LABEL in labels:
        other = shown(labels[SERVICE_PROXY_NAME_LABEL])
        return (
            f"{namespace}/{name} is left to another program, which its label {SERVICE_PROXY_NAME_LABEL} names: {other}"
        )
    ports = ", ".join(
        f"{item.get('name') or item.get('port')} ({item.get('port')}/{str(item.get('protocol', 'TCP')).lower()})"
        for item in spec.get("ports") or []
    )
    return f"{namespace}/{name} exists, but no such port of it is served here: it has {ports or 'none'}"
