# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sentinel: a service that changes in every step, so that a daemon's progress can be seen on the wire.

Once it answers on its new port the proxy has seen everything that was applied before it. If the node has a zone, the
endpoint is hinted at that zone and a second one at another, which shows whether the proxy has seen the zone as well.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from .objects import Object, key_of

NAMESPACE = "lab-sentinel"
ADDRESS = {4: "10.111.255.1", 6: "fd00:10:96::ffe1"}
ENDPOINT = {4: "10.244.2.250", 6: "fd00:10:244:2::250"}
OTHER_ENDPOINT = {4: "10.244.2.251", 6: "fd00:10:244:2::251"}
ELSEWHERE = "lab-elsewhere"

# Step n is announced by number n, and its end by SECOND + n.
SECOND = 500


def service_port(number: int) -> int:
    """Return the port that the service has when it announces *number*."""
    return 1000 + number


def endpoint_port(number: int) -> int:
    """Return the port that its endpoints have then."""
    return 7000 + number


def objects(number: int, families: Sequence[int], zone: str | None = None) -> list[Object]:
    """Return the Service and its EndpointSlices, with hints if *zone* is given."""
    names = [f"IPv{family}" for family in families]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": NAMESPACE, "name": "sentinel"},
        "spec": {
            "type": "ClusterIP",
            "clusterIP": ADDRESS[families[0]],
            "clusterIPs": [ADDRESS[f] for f in families],
            "ipFamilies": names,
            "ipFamilyPolicy": "RequireDualStack" if len(names) == 2 else "SingleStack",
            "ports": [
                {"name": "s", "port": service_port(number), "protocol": "TCP", "targetPort": endpoint_port(number)}
            ],
        },
    }
    return [service, *(_slice(number, family, zone) for family in families)]


def _slice(number: int, family: int, zone: str | None) -> Object:
    endpoints = [_endpoint(ENDPOINT[family], zone)]
    if zone:
        endpoints.append(_endpoint(OTHER_ENDPOINT[family], ELSEWHERE))
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "addressType": f"IPv{family}",
        "metadata": {
            "namespace": NAMESPACE,
            "name": f"sentinel-v{family}",
            "labels": {"kubernetes.io/service-name": "sentinel"},
        },
        "endpoints": endpoints,
        "ports": [{"name": "s", "port": endpoint_port(number), "protocol": "TCP"}],
    }


def _endpoint(address: str, zone: str | None) -> Object:
    endpoint: Object = {"addresses": [address], "conditions": {"ready": True}, "nodeName": "node2"}
    if zone:
        endpoint["hints"] = {"forZones": [{"name": zone}]}
    return endpoint


def is_sentinel(item: Object) -> bool:
    """Report whether an object is the sentinel's Service or one of its slices."""
    return key_of(item).namespace == NAMESPACE and item["kind"] in ("Service", "EndpointSlice")


def changed(snapshot: Sequence[Object], number: int) -> list[Object]:
    """Return the snapshot with the sentinel moved to the ports of *number* and put last."""
    others = [item for item in snapshot if not is_sentinel(item)]
    own = [copy.deepcopy(item) for item in snapshot if is_sentinel(item)]
    for item in own:
        if item["kind"] == "Service":
            item["spec"]["ports"][0].update(port=service_port(number), targetPort=endpoint_port(number))
        else:
            item["ports"][0]["port"] = endpoint_port(number)
    return others + own
