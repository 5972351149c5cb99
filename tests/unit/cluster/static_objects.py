# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Static Services and their EndpointSlices for tests."""

from __future__ import annotations

import json

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.static import parse_static
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName

NAME = NamespacedName("static", "apiserver")


def service(name="apiserver", ip="10.103.97.2", namespace="static", **metadata):
    """Return a Service with one port."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": namespace, "name": name, **metadata},
        "spec": {"clusterIP": ip, "ports": [{"port": 6443}]},
    }


def endpoint_slice(owner="apiserver", address="192.0.2.11", name="", namespace="static"):
    """Return an EndpointSlice with one endpoint."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": namespace,
            "name": name or f"{owner}-1",
            "labels": {"kubernetes.io/service-name": owner},
        },
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 6443}],
        "endpoints": [{"addresses": [address]}],
    }


def refused(*objects):
    """Return the refusals of a file with these objects, as text."""
    return [str(refusal) for refusal in parse_static({"f.yaml": objects}).refusals]


def altered(raw, path, value):
    """Return a copy of a raw object with one more or another value; ``path``: names and indices with dots."""
    copy = json.loads(json.dumps(raw))
    *parents, last = path.split(".")
    place = copy
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place.setdefault(name, {})
    place[last] = value
    return copy
