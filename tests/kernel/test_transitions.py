# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Connections that begin between two steps of a change fare as before the change or as after it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages.chains import chain_ownership
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Labelled
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import chains, restore, saved
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import ChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.saved import SavedChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import (
    XtablesVariant,
    detect_variant,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING as IPTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING as NFTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Resource, difference
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortInfo
from tests.kernel.packet_network import CLUSTER_IPS, NAMES, VIPS, Network, network, route, settings
from tests.lab.system import inside, ip_batch

__all__ = ["network"]

FAMILY = "IPv4"
CLUSTER_IP, VIP = CLUSTER_IPS[FAMILY], VIPS[FAMILY]
#: From where to what connections are opened: Services 1 and 2 by a pod, 3 and 4 by a client within their range.
FLOWS = [
    *(("p", CLUSTER_IP.format(number), 80) for number in (1, 2)),
    *(("x", VIP.format(number), 80) for number in (3, 4)),
]
#: A pod that is an endpoint opens connections as well.
FLOWS_OF_ENDPOINT = [*FLOWS, *(("l", CLUSTER_IP.format(number), 80) for number in (1, 2))]
NODE_PORT = 30005
Flow = tuple[str, str, int]


def services(first: str, second: str) -> list[ServicePortInfo]:
    """Return Services with these endpoints, two for pods and two that only clients within a range may use."""
    return [
        route(FAMILY, number, endpoints, **fields)
        for number, endpoints in ((1, first), (2, second), (3, first), (4, second))
        for fields in (_restricted(number) if number > 2 else {"externally_accessible": False},)
    ]


def _restricted(number: int) -> Any:
    return {"load_balancer_ips": (VIP.format(number),), "source_ranges": (NAMES[FAMILY]["range"],)}


class Node:
    """The node; connections are opened after each step of a change."""

    def __init__(self, network: Network, flows: Sequence[Flow]) -> None:
        self.flows = flows
        self.between: list[list[str]] = []
        self._network = network
        # What is neither redirected nor refused is lost.
        lost = [f"route add {network} dev lost" for network in (NAMES[FAMILY]["services"], VIP.format("0/24"))]
        ip_batch(["link add lost type bridge", "link set lost up arp off", *lost])

    def outcomes(self) -> list[str]:
        return [self._outcome(*flow) for flow in self.flows]

    def _outcome(self, place: str, address: str, port: int) -> str:
        with inside(f"/run/netns/{self._network.prefix}-{place}"):
            sock = socket.socket()
        with sock:
            sock.settimeout(0.8)
            try:
                sock.connect((address, port))
            except ConnectionRefusedError:
                return "refused"
            except socket.timeout:
                return "hangs"
            return "connected"

    def change(self, resource: Resource[Any, Any], wanted: Any) -> None:
        """Make a change; fail if a connection that begins between two steps fares unlike before and after it."""
        self.between.clear()
        before, observed = self.outcomes(), resource.observe()
        resource.apply(difference(observed, wanted(observed) if callable(wanted) else wanted))
        after = self.outcomes()
        for step in self.between:
            for flow, was, now, will in zip(self.flows, before, step, after):
                assert now in (was, will), (flow, was, now, will)


class IptablesNode(Node):
    """The node in iptables mode; a step is the commit of a table."""

    def __init__(self, network: Network, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(network, FLOWS)
        self.variant = detect_variant(FAMILY, variant)
        self._settings = settings(FAMILY, node_port_cidrs=())
        self.resource = ChainsResource(self.variant, chain_ownership(self._settings, True))
        self.resource.apply(difference(self.resource.observe(), self._desired(services("L", ""))))
        for module in (chains, saved):
            monkeypatch.setattr(module, "restore", self._slowly)

    def _slowly(self, variant: XtablesVariant, text: str, *more: Any) -> int:
        for part in text.split("COMMIT\n")[:-1]:
            restore.restore(variant, f"{part}COMMIT\n", *more)
            self.between.append(self.outcomes())
        return 0

    def _desired(self, routes: Sequence[ServicePortInfo]) -> Any:
        return IPTABLES.desired_tables({item.key: item for item in routes}, self._settings)["chains"]

    def serve(self, routes: Sequence[ServicePortInfo]) -> None:
        self.change(self.resource, self._desired(routes))


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_first_and_last_endpoints_in_iptables_mode(
    network: Network, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    node = IptablesNode(network, variant, monkeypatch)
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


class NftablesNode(Node):
    """The node in nftables mode, with as many transactions as possible; a step is one of them.

    ``limit``: after how many transactions a change is ended by a crash.
    """

    def __init__(
        self, network: Network, flows: Sequence[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(network, flows)
        self.limit = 1 << 30
        self._settings = settings(FAMILY)
        send = NftablesResource._send

        def slowly(resource: NftablesResource, labelled: list[Labelled]) -> None:
            if len(self.between) == self.limit:
                raise Crashed
            send(resource, labelled)
            self.between.append(self.outcomes())

        monkeypatch.setattr(NftablesResource, "_send", slowly)

    def serve(self, routes: Sequence[ServicePortInfo], most_elements: int = 1) -> None:
        wanted = NFTABLES.desired_tables({item.key: item for item in routes}, self._settings)["table objects"]
        with NftablesResource(FAMILY, most_elements) as resource:
            self.change(resource, wanted)


class Crashed(Exception):
    """The process has ended between two transactions."""


def test_transactions_of_nftables_mode(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the connections are those of a pod to itself, which must be masqueraded from the first packet on."""
    node = NftablesNode(network, FLOWS_OF_ENDPOINT, monkeypatch)
    node.serve(services("R", ""), 10_000)
    for endpoints in (("L", "L"), ("", "LR"), ("LR", "R")):
        node.serve(services(*endpoints))
        assert len(node.between) > 3


def sticky(endpoints: str, seconds: int = 60) -> list[ServicePortInfo]:
    """Return a Service for pods and one that has a node port, with session affinity unless ``seconds`` is 0."""
    fields: Any = {"external_local": True, "node_port": NODE_PORT}
    return [
        route(FAMILY, 1, endpoints, affinity_seconds=seconds, externally_accessible=False),
        route(FAMILY, 5, endpoints, affinity_seconds=seconds, **fields),
    ]


def test_changed_chains_and_crashes_in_nftables_mode(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    flows = [("p", CLUSTER_IP.format(1), 80), ("x", NAMES[FAMILY]["N"], NODE_PORT)]
    node = NftablesNode(network, flows, monkeypatch)
    node.serve(sticky("LR", 0), 10_000)
    assert node.outcomes() == ["connected", "connected"]
    # The process ends after it has made chains and before their rules; the next one continues.
    node.limit = 10
    with pytest.raises(Crashed):
        node.serve(sticky("LR"))
    node.limit = 1 << 30
    node.serve(sticky("LR"))
    assert node.outcomes() == ["connected", "connected"]
    # Without a local endpoint, connections to the node port are dropped rather than refused by the node itself.
    node.serve(sticky("R"))
    assert node.outcomes() == ["connected", "hangs"]
