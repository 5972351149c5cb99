# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The demonstration's cluster: the laboratory's snapshot with one node for each mode."""

from __future__ import annotations

import copy
import ipaddress
import json
import os
from pathlib import Path
from typing import Sequence

from tests.lab.cluster import SNAPSHOT
from tests.lab.topology import LabNode

# Exists in every network namespace of a kernel that has ip_vs loaded. Nothing is loaded into the host's kernel.
_IPVS = "/proc/net/ip_vs"


def host_has_ipvs() -> bool:
    """Return whether the host's kernel can serve the IPVS node in a network namespace."""
    return os.path.exists(_IPVS)


def _allowed(node: LabNode) -> str:
    """Return the source range that holds a node's client and not its stranger."""
    return str(ipaddress.ip_network(f"{node.client}/29", strict=False))


def write_snapshot(path: Path, nodes: Sequence[LabNode]) -> None:
    """Write the cluster's state for the demonstration's nodes.

    The pods that the laboratory's snapshot has on its IPVS node run on the nftables node, so that no answer waits for a
    guest that is still booting; the IPVS node has none.
    """
    text = SNAPSHOT.read_text(encoding="utf-8").replace('"lab-ipvs"', '"lab-nftables"')
    document = json.loads(text)
    pattern = next(item for item in document["items"] if item["metadata"]["name"] == "lab-iptables")
    for node in nodes:
        if any(item["kind"] == "Node" and item["metadata"]["name"] == node.name for item in document["items"]):
            continue
        added = copy.deepcopy(pattern)
        added["metadata"]["name"] = node.name
        added["metadata"]["labels"]["kubernetes.io/hostname"] = node.name
        added["spec"].update(podCIDR=node.pods, podCIDRs=[node.pods, node.pods6])
        added["status"]["addresses"] = [
            {"address": node.address, "type": "InternalIP"},
            {"address": node.address6, "type": "InternalIP"},
            {"address": node.name, "type": "Hostname"},
        ]
        document["items"].append(added)
    for item in document["items"]:
        if item.get("spec", {}).get("loadBalancerSourceRanges"):
            # The client of each node is allowed, its stranger is not.
            item["spec"]["loadBalancerSourceRanges"] = list(map(_allowed, nodes))
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
