# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Connections that begin between two commits of iptables-restore fare as before the change or as after it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, List, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.stages.chains import chain_ownership
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import chains, restore, saved
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import ChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.saved import SavedChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import (
    XtablesVariant,
    detect_variant,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Resource, difference
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortInfo
from tests.kernel.packet_network import CLUSTER_IPS, NAMES, VIPS, Network, network, route, settings
from tests.lab.system import inside, ip_batch

__all__ = ["network"]

FAMILY = "IPv4"
CLUSTER_IP, VIP = CLUSTER_IPS[FAMILY], VIPS[FAMILY]
#: From where to what connections are opened: Services 1 and 2 by a pod, 3 and 4 by a client within their range.
FLOWS = [*(("p", CLUSTER_IP.format(number)) for number in (1, 2)), *(("x", VIP.format(number)) for number in (3, 4))]


def services(first: str, second: str) -> List[ServicePortInfo]:
    """Return Services with these endpoints, two for pods and two that only clients within a range may use."""
    return [
        route(FAMILY, number, endpoints, **fields)
        for number, endpoints in ((1, first), (2, second), (3, first), (4, second))
        for fields in (_restricted(number) if number > 2 else {"externally_accessible": False},)
    ]


def _restricted(number: int) -> Any:
    return {"load_balancer_ips": (VIP.format(number),), "source_ranges": (NAMES[FAMILY]["range"],)}


class Node:
    """The node in iptables mode; connections are opened after each commit."""

    def __init__(self, network: Network, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.variant = detect_variant(FAMILY, variant)
        self.settings = settings(FAMILY, node_port_cidrs=())
        self.resource = ChainsResource(self.variant, chain_ownership(self.settings, True))
        self.between: List[List[str]] = []
        self._network = network
        # What is neither redirected nor refused is lost.
        lost = [f"route add {network} dev lost" for network in (NAMES[FAMILY]["services"], VIP.format("0/24"))]
        ip_batch(["link add lost type bridge", "link set lost up arp off", *lost])
        self.resource.apply(difference(self.resource.observe(), self._desired(services("L", ""))))
        for module in (chains, saved):
            monkeypatch.setattr(module, "restore", self._slowly)

    def _slowly(self, variant: XtablesVariant, text: str, *more: Any) -> int:
        for part in text.split("COMMIT\n")[:-1]:
            restore.restore(variant, f"{part}COMMIT\n", *more)
            self.between.append(self.outcomes())
        return 0

    def outcomes(self) -> List[str]:
        return [self._outcome(*flow) for flow in FLOWS]

    def _outcome(self, place: str, address: str) -> str:
        with inside(f"/run/netns/{self._network.prefix}-{place}"):
            sock = socket.socket()
        with sock:
            sock.settimeout(0.8)
            try:
                sock.connect((address, 80))
            except ConnectionRefusedError:
                return "refused"
            except socket.timeout:
                return "hangs"
            return "connected"

    def _desired(self, routes: Sequence[ServicePortInfo]) -> Any:
        return RENDERING.desired_tables({item.key: item for item in routes}, self.settings)["chains"]

    def serve(self, routes: Sequence[ServicePortInfo]) -> None:
        self.change(self.resource, self._desired(routes))

    def change(self, resource: Resource[Any, Any], wanted: Any) -> None:
        """Make a change; fail if a connection that begins between two commits fares unlike before and after it."""
        self.between.clear()
        before, observed = self.outcomes(), resource.observe()
        resource.apply(difference(observed, wanted(observed) if callable(wanted) else wanted))
        after = self.outcomes()
        for step in self.between:
            for flow, was, now, will in zip(FLOWS, before, step, after):
                assert now in (was, will), (flow, was, now, will)


@pytest.fixture(params=["nft", "legacy"])
def node(network: Network, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    return Node(network, request.param, monkeypatch)


def test_first_and_last_endpoints(node: Node) -> None:
    assert node.outcomes() == ["connected", "refused"] * 2
    state = SavedChainsResource(node.variant, node.resource.ownership).observe()
    # In one change: Services get their first endpoint, and others lose their last one.
    node.serve(services("", "L"))
    assert node.outcomes() == ["refused", "connected"] * 2 and len(node.between) == 3
    # Each alone needs no more commits than there are tables.
    for routes in (services("L", "L"), services("", "")):
        node.serve(routes)
        assert len(node.between) == 2
    # A rollback restores texts of iptables-save.
    rollback = SavedChainsResource(node.variant, node.resource.ownership, state)
    node.change(rollback, rollback.desired)
    assert node.outcomes() == ["connected", "refused"] * 2
