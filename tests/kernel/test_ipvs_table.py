# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table beside IPVS in a real kernel, without IPVS: written, read back, loaded by nft, beside NAT of others."""

from __future__ import annotations

import select
import socket
import subprocess
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import BEHAVIOURS
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.registry import ipvs_with
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.ipvs_table import IpvsTableResource
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight.limits import ELEMENTS_LIMIT
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.mode import OVER_NFTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.nftables_layout import ADDRESSES, RESOURCE
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.own_servers import server_record
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import ElementKey
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.lab.system import ip_batch
from tests.unit.rendering.nftables.samples import sample_routes, sample_settings, settings_of_other_rules

FAMILIES = ("IPv4", "IPv6")
SERVICE, OTHER = "172.30.0.1", "192.0.2.9"
# As a port that a container runtime maps on all addresses of the node.
MAPPED_PORT = """
table ip external {
    chain mapped {
        type nat hook output priority -100; policy accept;
        fib daddr type local tcp dport 8080 dnat to %s:8081
    }
}
"""


def desired(family: str, **changes: Any) -> dict[Any, Any]:
    return OVER_NFTABLES.desired_tables(sample_routes(family), sample_settings(family, **changes))[RESOURCE]


def nft(script: str) -> None:
    done = subprocess.run(["nft", "-f", "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_has_what_is_desired_and_nft_loads_the_same(family, behaviour):
    assert ipvs_with("nftables").unsupported_reasons([family]) == []
    with IpvsTableResource(family) as resource:
        assert not resource.exists()
        for changes in ({}, *settings_of_other_rules()):
            wanted = desired(family, behaviour=BEHAVIOURS[behaviour], **changes)
            resource.apply(difference(resource.observe(), wanted))
            assert not difference(resource.observe(), wanted)
            nft(OVER_NFTABLES.filter_backend.texts(family, {RESOURCE: wanted})[f"nft {family}"])
            assert not difference(resource.observe(), wanted)
        assert resource.exists()
        subprocess.run(["nft", "list", "ruleset"], capture_output=True, check=True)
        # When ipvs mode is left, what is left has no rule; then nothing is left.
        for rest in (server_record(wanted), {}):
            resource.apply(difference(resource.observe(), rest))
            assert resource.observe() == rest
        assert not resource.exists()


def test_sets_hold_more_than_an_ipset():
    """Ipsets of this project end at 65,536 elements, above which the filter backend of iptables is refused."""
    wanted = desired("IPv4")
    for number in range(ELEMENTS_LIMIT + 5000):
        address = (0x0B000000 + number).to_bytes(4, "big")
        wanted[ElementKey("element", ADDRESSES, address)] = True
    with IpvsTableResource("IPv4") as resource:
        resource.apply(difference({}, wanted))
        assert not difference(resource.observe(), wanted)
        resource.apply(difference(wanted, {}))
        assert not resource.exists()


def test_nat_of_other_programs_does_not_redirect_connections_to_service_addresses():
    ip_batch(["link set lo up", f"address add {SERVICE}/32 dev lo", f"address add {OTHER}/32 dev lo"])
    route = next(item for item in sample_routes("IPv4").values())
    only = {route.key: route._replace(cluster_ip=SERVICE, port=8080, node_port=0)}
    with socket.create_server((SERVICE, 8080)) as service, socket.create_server((OTHER, 8081)) as mapped:
        nft(MAPPED_PORT % OTHER)

        def reached() -> socket.socket:
            with socket.create_connection((SERVICE, 8080), timeout=10):
                ready = select.select([service, mapped], [], [], 10)[0]
                assert len(ready) == 1
                ready[0].accept()[0].close()
            return ready[0]

        assert reached() is mapped
        with IpvsTableResource("IPv4") as resource:
            resource.apply(difference({}, OVER_NFTABLES.desired_tables(only, sample_settings("IPv4"))[RESOURCE]))
        assert reached() is service
