# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The comparison of kube-proxy's configuration with a host's, and what a host adopts of it."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.comparison import adopted, differences
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.documents import parse_documents
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.field import HONOURED, Field
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.fields import FIELDS
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import KubeProxyConfiguration
from tests.documentation.settings import documented_default
from tests.unit.configuration.kubeadm_configuration import KUBEADM

PODS = "10.244.0.0/16,fd00:10:244::/48"


def kubeadm() -> dict[str, Any]:
    return dict(parse_documents(KUBEADM, []).kube_proxy)


def fields(theirs: dict[str, Any], own: dict[str, Any]) -> list[str]:
    return [item.field for item in differences(theirs, own)]


def test_of_kubeadms_configuration_only_what_changes_traffic_counts() -> None:
    found = differences(kubeadm(), {"mode": "nftables", "metricsBindAddress": "0.0.0.0"})
    assert [str(item) for item in found] == [
        f"clusterCIDR: kube-proxy has {PODS}, the host none",
        "conntrack.maxPerCore: kube-proxy has 0, the host none",
    ]
    assert not any(item.chosen for item in found)
    assert adopted(kubeadm()) == {"clusterCIDR": PODS, "conntrack": {"maxPerCore": 0}}
    assert fields(kubeadm(), adopted(kubeadm())) == []


def test_a_field_that_the_host_sets_is_chosen() -> None:
    own = {"clusterCIDR": "10.0.0.0/8", "conntrack": {"maxPerCore": 0}}
    assert [(item.field, item.own, item.chosen) for item in differences(kubeadm(), own)] == [
        ("clusterCIDR", "10.0.0.0/8", True)
    ]


@pytest.mark.parametrize(
    ("theirs", "own", "expected"),
    [
        # A block of another mode has no effect; masqueradeAll of kube-proxy's own mode has.
        ({"mode": "iptables", "ipvs": {"scheduler": "lc"}}, {"mode": "nftables"}, []),
        ({"mode": "iptables", "ipvs": {"scheduler": "lc"}}, {"mode": "ipvs"}, ["ipvs.scheduler"]),
        ({"iptables": {"masqueradeAll": True}}, {"mode": "nftables"}, ["nftables.masqueradeAll"]),
        ({"mode": "nftables", "nftables": {"masqueradeAll": True}}, {}, ["iptables.masqueradeAll"]),
        ({"mode": "nftables", "iptables": {"masqueradeAll": True}}, {}, []),
        ({"nodePortAddresses": ["192.0.2.0/24"]}, {}, ["nodePortAddresses"]),
        ({"nodePortAddresses": ["192.0.2.0/24"]}, {"nodePortAddresses": ["192.0.2.0/24"]}, []),
        ({"featureGates": {"AllowServiceExternalIPs": False}}, {}, ["featureGates.AllowServiceExternalIPs"]),
        ({"featureGates": {"ComponentFlagz": False}, "oomScoreAdj": 0, "hostnameOverride": "a"}, {}, []),
        ({"clusterCIDR": "10.244.0.0/16"}, {"clusterCIDR": "10.244.0.0/16"}, []),
        ({"ipvs": {"strictARP": True}}, {"mode": "auto"}, ["ipvs.strictARP"]),
    ],
)
def test_fields_are_compared_as_the_engine_reads_them(
    theirs: dict[str, Any], own: dict[str, Any], expected: list[str]
) -> None:
    assert fields(theirs, own) == expected
    mode = {"mode": own["mode"]} if "mode" in own else {}
    assert fields(theirs, {**adopted(theirs), **mode}) == []


#: A value other than the default, by the default that the row of a field names.
OTHER: dict[str, Any] = {"`true`": False, "`false`": True, "`rr`": "lc", "none": ["192.0.2.0/24"]}
OF_FIELD: dict[str, Any] = {
    "bindAddress": "192.0.2.1",
    "detectLocalMode": "NodeCIDR",
    "detectLocal.bridgeInterface": "cni0",
    "detectLocal.interfaceNamePrefix": "veth",
    "clusterCIDR": "10.244.0.0/16",
    "nodePortAddresses": ["192.0.2.0/24"],
}


@pytest.mark.parametrize(
    "field",
    [field for field in FIELDS if field.effect == HONOURED and field.name not in ("mode", "hostnameOverride")],
    ids=lambda field: field.name,
)
def test_every_field_that_changes_traffic_is_compared(field: Field) -> None:
    default = documented_default(field, KubeProxyConfiguration())
    duration = "77s" if default.endswith(("s`", "h`")) else 7
    source: dict[str, Any] = {"mode": "iptables" if field.modes == "all" else field.modes.split(",")[0]}
    mode = dict(source)
    *blocks, leaf = field.name.split(".")
    place = source
    for block in blocks:
        place = place.setdefault(block, {})
    place[leaf] = OF_FIELD.get(field.name, OTHER.get(default, duration))
    assert fields(source, mode) == [field.name]
    assert fields(source, adopted(source)) == []
