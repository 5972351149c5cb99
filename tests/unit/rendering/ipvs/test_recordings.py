# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state that ipvs mode renders for each conformance case equals that of kube-proxy v1.36.2.

The comparison covers virtual servers, real servers, sets with their elements, addresses, chains and jump rules of each
family whose recording is complete. The lab's sentinel Service is omitted: the lab changes it once more than it
records. Real servers at weight 0 are draining ones of kube-proxy, which rendering does not produce.
"""

from __future__ import annotations

import re

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES, family_of, parse_network
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import observed_table, parse_save
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import CHAINS
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs import model
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.chains import ownership
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.text import ipset_text, ipvsadm_text
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from tests.unit.recordings import Step, steps

NODE_ADDRESSES = {
    "IPv4": (("lo", "127.0.0.1"), ("eth0", "172.18.0.2"), ("eth1", "172.19.0.2"), ("vethpod1", "10.244.1.1")),
    "IPv6": (("lo", "::1"), ("eth0", "fd00:172:18::2"), ("eth1", "fd00:172:19::2"), ("vethpod1", "fd00:10:244:1::1")),
}
SENTINEL = {"10.111.255.1", "fd00:10:96::ffe1"}


STEPS = list(steps("ipvs"))


def settings_of(step: Step, family: str, pod_cidrs: tuple[str, ...]) -> DataplaneSettings:
    cidrs = tuple(cidr for cidr in step.config.get("nodePortAddresses", ()) if family_of(cidr) == family)
    networks = [network for network in map(parse_network, cidrs) if network]
    return DataplaneSettings(
        family=family,
        node_ip=NODE_ADDRESSES[family][1][1],
        masquerade_all=bool(step.config.get("iptables", {}).get("masqueradeAll")),
        local_traffic=step.local_traffic(family, pod_cidrs),
        node_port_cidrs=cidrs,
        node_port_addresses=tuple(
            address
            for _name, address in NODE_ADDRESSES[family]
            if any(network.contains(address) for network in networks)
        ),
        node_addresses=NODE_ADDRESSES[family],
        scheduler=step.config.get("ipvs", {}).get("scheduler") or "rr",
    )


def without_sentinel(lines: set[str]) -> set[str]:
    return {line for line in lines if not any(address in line for address in SENTINEL)}


def excluded(step: Step, line: str) -> bool:
    """Return whether the line is about an external virtual server inside excludeCIDRs."""
    address = line.split()[2].rpartition(":")[0].strip("[]")
    networks = map(parse_network, step.config.get("ipvs", {}).get("excludeCIDRs", ()))
    return any(network is not None and network.contains(address) for network in networks)


def of_family(line: str, family: str) -> bool:
    return ("[" in line) == (family == "IPv6")


def complete(step: Step, family: str) -> bool:
    """Return whether the family was recorded after a complete sync."""
    tool = "iptables" if family == "IPv4" else "ip6tables"
    nat, filtering = (step.saved.get(f"{tool}-save -t {table}", "") for table in ("nat", "filter"))
    return "-A KUBE-IPVS-FILTER" in filtering and "set --match-set" in nat


COMPLETE = [(step, family) for step in STEPS for family in FAMILIES if complete(step, family)]


@pytest.mark.parametrize(("step", "family"), COMPLETE, ids=str)
def test_rendering_equals_what_kube_proxy_programmed(step: Step, family: str) -> None:
    state = ClusterState.from_objects(step.objects)
    node = state.nodes["node1"]
    settings = settings_of(step, family, node.pod_cidrs)
    tables = RENDERING.desired_tables(all_service_ports(state, NodeContext(family, "node1", node.zone)), settings)

    text = ipvsadm_text(tables[model.VIRTUAL_SERVERS], tables[model.REAL_SERVERS])
    saved = {line for line in step.saved["ipvsadm -Sn"].splitlines() if line and of_family(line, family)}
    left_alone = {line for line in saved if line.endswith("-w 0") or excluded(step, line)}
    assert without_sentinel(set(text.splitlines())) == without_sentinel(saved - left_alone)

    infix = re.compile(r" KUBE-6-")
    saved = {
        re.sub(r" (bucketsize|initval) \w+", "", line)
        for line in step.saved["ipset save"].splitlines()
        if line and bool(infix.search(line)) == (family == "IPv6")
    }
    text = ipset_text(tables[model.SETS], tables[model.SET_ELEMENTS])
    assert without_sentinel(set(text.splitlines())) == without_sentinel(saved)

    option = "inet6" if family == "IPv6" else "inet"
    addresses = re.findall(rf"{option} (\S+)/\d+", step.saved["ip -o addr show dev kube-ipvs0"])
    assert set(tables[model.ADDRESSES]) - SENTINEL == set(addresses) - SENTINEL

    tool = "iptables" if family == "IPv4" else "ip6tables"
    saved_rules = "\n".join(step.saved[f"{tool}-save -t {table}"] for table in ("nat", "filter"))
    assert tables[CHAINS] == observed_table(parse_save(saved_rules), family, ownership())


def test_there_are_many_recordings() -> None:
    assert len(COMPLETE) > 80
    assert {family for _step, family in COMPLETE} == set(FAMILIES)
