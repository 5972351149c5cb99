# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Explanations of flows: the decision of each mode, differences from the kernel, open connections, and the text."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import (
    KernelError,
    ProxyError,
    UnknownDestination,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.command.connection_lines import connection_lines
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import CORRECTED, KUBE_PROXY
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyContext
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.handles import KernelHandles
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.live import LiveConnection, Remembered
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import mode_named
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.connection import Subject, connection_document
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.explain import ExplainedFamily, desired_family
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.flow import origin_of
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.flows import Kernel
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.target import parse_end
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.rtnetlink.routes import Way
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import (
    RealServer,
    RealServerKey,
    VirtualServerKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import ElementKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Resource, Stage
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext
from tests.lab import manifests
from tests.unit.command.node_command import ENDPOINTS, SERVICE

MODES = ("nftables", "iptables", "ipvs", "userspace")
POD, OUTSIDE, NODE, VIP = "10.244.1.9", "198.51.100.7", "192.0.2.1", "203.0.113.7"
LOCAL, REMOTE = "10.244.1.5:8080", "10.244.2.5:8080"
SETTINGS = DataplaneSettings(
    "IPv4",
    "node1",
    NODE,
    local_traffic=LocalTraffic("cidr", "10.244.0.0/16"),
    node_addresses=(("eth0", NODE),),
    node_port_addresses=(NODE,),
    schedulers=frozenset(("mh", "jhash")),
)


class Stub(Resource[Any, Any]):
    """A resource that holds a table."""

    def __init__(self, kind: str, table: dict[Any, Any]) -> None:
        self.kind, self.family, self.table = kind, "IPv4", table

    def observe(self) -> dict[Any, Any]:
        return self.table


def family_of(mode: str, objects: Sequence[Any], settings: DataplaneSettings) -> ExplainedFamily:
    context = NodeContext("IPv4", "node1", "zone-a", behaviour=settings.behaviour)
    return desired_family(
        ClusterState.from_objects(objects), mode_named(mode).rendering, FamilyContext(settings, context, None)
    )


def document(
    mode: str,
    source: str,
    destination: str,
    objects: Sequence[Any] = (SERVICE, ENDPOINTS),
    settings: DataplaneSettings = SETTINGS,
    kernel: Optional[Kernel] = None,
) -> dict[str, Any]:
    subject = Subject(
        ClusterState.from_objects(objects),
        [family_of(mode, objects, settings)],
        mode_named(mode),
        "node1",
        kernel,
        None,
    )
    return connection_document(subject, parse_end(source, False), parse_end(destination, True))


def flow(*words: Any, **more: Any) -> dict[str, Any]:
    (found,) = document(*words, **more)["flows"]
    return dict(found)


def chosen(found: dict[str, Any]) -> list[str]:
    return [item["endpoint"] for item in found["endpoints"] if item["chosen"]]


def changed(spec: dict[str, Any], annotations: Optional[dict[str, str]] = None) -> dict[str, Any]:
    metadata = {**SERVICE["metadata"], "annotations": annotations or {}}
    return {**SERVICE, "metadata": metadata, "spec": {**SERVICE["spec"], **spec}}


@pytest.mark.parametrize("mode", MODES)
def test_probabilities_add_up_and_each_endpoint_has_a_reason(mode: str) -> None:
    found = flow(mode, OUTSIDE, "10.96.0.7:80")
    assert (found["verdict"], found["via"], found["trafficPolicy"]) == ("forwarded", "cluster IP", "Cluster")
    assert {item["endpoint"]: item["probability"] for item in found["endpoints"]} == {
        LOCAL: 0.5,
        REMOTE: 0.5,
        "10.244.2.6:8080": 0.0,
        "10.244.2.7:8080": 0.0,
    }
    assert all(item["reason"] for item in found["endpoints"]) and found["endpoint"] == ""
    assert found["chosenBy"] and found["masqueraded"]


@pytest.mark.parametrize(
    ("mode", "behaviour", "source", "endpoints", "masqueraded"),
    [
        ("nftables", KUBE_PROXY, OUTSIDE, [LOCAL], False),
        ("nftables", KUBE_PROXY, POD, [LOCAL, REMOTE], False),
        ("nftables", KUBE_PROXY, NODE, [LOCAL, REMOTE], True),
        ("iptables", KUBE_PROXY, POD, [LOCAL, REMOTE], False),
        ("iptables", KUBE_PROXY, NODE, [LOCAL, REMOTE], True),
        ("ipvs", KUBE_PROXY, POD, [LOCAL], False),
        ("ipvs", CORRECTED, POD, [LOCAL, REMOTE], False),
        ("ipvs", CORRECTED, NODE, [LOCAL, REMOTE], True),
        ("ipvs", CORRECTED, OUTSIDE, [LOCAL], False),
        ("userspace", KUBE_PROXY, POD, [LOCAL], True),
    ],
)
def test_policy_local_depends_on_the_client(
    mode: str, behaviour: Any, source: str, endpoints: list[str], masqueraded: bool
) -> None:
    found = flow(mode, source, f"{VIP}:80", settings=SETTINGS._replace(behaviour=behaviour))
    assert (chosen(found), found["masqueraded"]) == (endpoints, masqueraded)
    reasons = {item["endpoint"]: item["reason"] for item in found["endpoints"]}
    assert reasons[LOCAL] == ("ready" if REMOTE in endpoints else "ready, on this node")
    assert (reasons[REMOTE] == "ready") == (REMOTE in endpoints)
    assert found["endpoint"] == (endpoints[0] if len(endpoints) == 1 else "")


@pytest.mark.parametrize(
    ("settings", "source", "masqueraded", "reason"),
    [
        (SETTINGS, POD, False, "a pod, as"),
        (SETTINGS, NODE, True, "not a pod"),
        (SETTINGS._replace(masquerade_all=True), POD, True, "masqueradeAll"),
        (SETTINGS._replace(local_traffic=None), NODE, False, "no detectLocalMode"),
    ],
)
def test_masquerading_of_internal_traffic(
    settings: DataplaneSettings, source: str, masqueraded: bool, reason: str
) -> None:
    found = flow("nftables", source, "10.96.0.7:80", settings=settings)
    assert found["masqueraded"] is masqueraded and found["masqueradeReason"].startswith(reason)
    assert flow("ipvs", NODE, "10.96.0.7:80", settings=settings)["masqueraded"]


@pytest.mark.parametrize("mode", MODES)
def test_sources_that_are_not_allowed(mode: str) -> None:
    service = changed({"loadBalancerSourceRanges": ["198.51.100.0/24"]})
    objects = (service, ENDPOINTS)
    assert flow(mode, OUTSIDE, f"{VIP}:80", objects)["verdict"] == "forwarded"
    found = flow(mode, "192.0.2.77", f"{VIP}:80", objects)
    assert found["verdict"] == ("refused" if mode == "userspace" else "dropped")
    assert found["reason"] == "192.0.2.77 is not among the allowed sources" and found["endpoint"] == ""
    assert found["sourceRanges"] == ["198.51.100.0/24"]


@pytest.mark.parametrize(
    ("mode", "verdict"),
    [("nftables", "refused"), ("iptables", "unchanged"), ("ipvs", "refused"), ("userspace", "refused")],
)
def test_destinations_that_no_service_has(mode: str, verdict: str) -> None:
    assert flow(mode, OUTSIDE, "10.96.0.7:81")["verdict"] == verdict
    assert flow(mode, OUTSIDE, "10.99.0.7:80")["verdict"] == "unchanged"
    assert flow(mode, OUTSIDE, "10.96.0.7:80", [SERVICE])["verdict"] == "refused"


@pytest.mark.parametrize(
    ("rejected", "verdict", "reason"),
    [
        (("tcp", "udp", "sctp"), "refused", "node ports that nodePortAddresses do not name are refused at loopback"),
        (("udp", "sctp"), "unchanged", "no Service has this destination"),
        ((), "unchanged", "no Service has this destination"),
    ],
)
def test_node_ports_at_loopback_addresses(rejected: Any, verdict: str, reason: str) -> None:
    settings = SETTINGS._replace(localhost_node_ports=False, localhost_rejected=rejected)
    found = flow("nftables", "127.0.0.1", "127.0.0.1:30080", settings=settings)
    assert (found["verdict"], found["reason"].startswith(reason)) == (verdict, True)
    assert not any(item["chosen"] for item in found.get("endpoints", ()))


def test_hashing_weights_and_the_port_of_the_client() -> None:
    address = {"kubenode.proxy/scheduler": "maglev"}
    by_port = {**address, "kubenode.proxy/scheduler-flags": "mh-port"}
    found = flow("nftables", OUTSIDE, "10.96.0.7:80", (changed({}, address), ENDPOINTS))
    assert found["endpoint"] in (LOCAL, REMOTE) and found["endpointReason"] == "by the client's address"
    objects = (changed({}, by_port), ENDPOINTS)
    assert flow("nftables", OUTSIDE, "10.96.0.7:80", objects)["endpoint"] == ""
    reached = {flow("nftables", f"{OUTSIDE}:{port}", "10.96.0.7:80", objects)["endpoint"] for port in range(1, 40)}
    assert reached == {LOCAL, REMOTE}
    metadata = {**ENDPOINTS["metadata"], "annotations": {"kubenode.proxy/weight": "3"}}
    heavy = {**ENDPOINTS, "metadata": metadata, "endpoints": ENDPOINTS["endpoints"][:1]}
    light = {
        **ENDPOINTS,
        "metadata": {**ENDPOINTS["metadata"], "name": "web-2"},
        "endpoints": ENDPOINTS["endpoints"][1:],
    }
    for mode in MODES:
        found = flow(mode, OUTSIDE, "10.96.0.7:80", (SERVICE, heavy, light))
        assert [item["probability"] for item in found["endpoints"][:2]] == [0.75, 0.25], mode
    least = flow("ipvs", OUTSIDE, "10.96.0.7:80", settings=SETTINGS._replace(scheduler="lc"))
    assert [item["probability"] for item in least["endpoints"][:2]] == [None, None]


@pytest.mark.parametrize(
    ("traffic", "address", "way", "of_node", "is_pod"),
    [
        (LocalTraffic("cidr", "10.244.0.0/16"), POD, None, False, True),
        (LocalTraffic("cidr", "10.244.0.0/16"), NODE, None, True, False),
        (LocalTraffic("bridge", "cni0"), POD, Way(False, "cni0"), False, True),
        (LocalTraffic("bridge", "cni0"), POD, Way(False, "eth0"), False, False),
        (LocalTraffic("prefix", "cali"), POD, Way(False, "cali12"), False, True),
        (LocalTraffic("prefix", "cali"), "10.244.1.1", Way(True, "lo"), True, False),
        (None, POD, None, False, False),
        (None, "127.0.0.1", None, True, False),
    ],
)
def test_what_a_client_is(
    traffic: Optional[LocalTraffic], address: str, way: Optional[Way], of_node: bool, is_pod: bool
) -> None:
    found = origin_of(address, 0, SETTINGS._replace(local_traffic=traffic), way)
    assert (found.client.of_node, found.client.is_pod) == (of_node, is_pod) and found.reason


def held_by(mode: str, family: ExplainedFamily) -> Kernel:
    """Return a kernel that holds what is desired; its tables can be changed."""
    stubs = [Stub(kind, dict(table)) for kind, table in family.tables.desired.items()]
    stages = [Stage(stub, dict(stub.table)) for stub in stubs]
    return Kernel(KernelHandles(), lambda _family: stages)


def table_of(kernel: Kernel, family: ExplainedFamily, kind: str) -> dict[Any, Any]:
    (found,) = [stage.resource for stage in kernel.stages(family) if stage.resource.kind == kind]
    assert isinstance(found, Stub)
    return found.table


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No routes, no open connections and no affinity."""
    for mode in map(mode_named, MODES):
        monkeypatch.setattr(type(mode), "live_connections", lambda *_args: [])
        monkeypatch.setattr(type(mode), "tracked_connections", lambda *_args: [])
        monkeypatch.setattr(type(mode), "remembered", lambda *_args: [])
    module = "ansible_collections.kubenode.proxy.plugins.module_utils.explain.flows.way_to"
    monkeypatch.setattr(module, lambda _sock, _address: Way(False, "eth0"))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("destination", ["10.96.0.7:80", f"{VIP}:80", f"{NODE}:30080"])
def test_a_kernel_that_holds_what_is_desired_does_not_differ(mode: str, destination: str) -> None:
    family = family_of(mode, (SERVICE, ENDPOINTS), SETTINGS)
    found = document(mode, OUTSIDE, destination, kernel=held_by(mode, family))
    assert found["differences"] == [] and found["flows"][0]["kernel"]
    assert all(row["state"] == "" for row in found["flows"][0]["kernel"])


@pytest.mark.usefixtures("quiet")
def test_entries_that_are_missing_or_not_desired_differ() -> None:
    for mode in MODES:
        family = family_of(mode, (SERVICE, ENDPOINTS), SETTINGS)
        kernel = held_by(mode, family)
        for stage in kernel.stages(family):
            assert isinstance(stage.resource, Stub)
            stage.resource.table.clear()
        found = document(mode, OUTSIDE, "10.96.0.7:80", kernel=kernel)
        assert any(line.startswith("missing in the kernel: ") for line in found["differences"]), mode
        assert (found["flows"][0]["verdict"], found["flows"][0]["reason"]) == (
            "unchanged",
            "the kernel holds nothing for this destination (desired: forwarded)",
        )
        assert any(line.startswith("    + ") for line in connection_lines(found, why_not=False)), mode
    family = family_of("ipvs", (SERVICE, ENDPOINTS), SETTINGS)
    kernel = held_by("ipvs", family)
    servers = table_of(kernel, family, "real servers")
    servers[RealServerKey(VirtualServerKey("tcp", "10.96.0.7", 80), "10.9.9.9", 80)] = RealServer(1)
    (line,) = document("ipvs", OUTSIDE, "10.96.0.7:80", kernel=kernel)["differences"]
    assert line == "not desired: -a -t 10.96.0.7:80 -r 10.9.9.9:80 -m -w 1"
    family = family_of("nftables", (SERVICE, ENDPOINTS), SETTINGS)
    kernel = held_by("nftables", family)
    table = table_of(kernel, family, "table objects")
    lists = [key for key in table if isinstance(key, ElementKey) and key.name == "service-endpoints"]
    (key,) = [key for key in lists if key.key.startswith(bytes((10, 96, 0, 7)))]
    table[key] = table[key][:1]
    found = document("nftables", OUTSIDE, "10.96.0.7:80", kernel=kernel)
    assert found["flows"][0]["verdict"] == "uncertain"
    assert found["differences"] == [
        "missing in the kernel: element ip kube-proxy service-endpoints "
        "{ 10.96.0.7 . tcp . 80 . 1 : 10.244.2.5 . 8080 }"
    ]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("chain", "verdict", "reason"),
    [
        ("KUBE-SERVICES", "unchanged", "the kernel holds nothing for this destination"),
        ("KUBE-SVC-", "unchanged", "the kernel holds no entry that leads to an endpoint"),
        ("KUBE-MARK-MASQ", "uncertain", "the kernel holds other entries than desired"),
    ],
)
def test_the_verdict_is_about_the_entries_of_the_kernel(chain: str, verdict: str, reason: str) -> None:
    family = family_of("iptables", (SERVICE, ENDPOINTS), SETTINGS)
    kernel = held_by("iptables", family)
    table = table_of(kernel, family, "chains")
    for key in [key for key in table if isinstance(key, ChainKey) and key.chain.startswith(chain)]:
        table[key] = ()
    (flow,) = document("iptables", OUTSIDE, "10.96.0.7:80", kernel=kernel)["flows"]
    assert flow["verdict"] == verdict and flow["reason"].startswith(reason), flow


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("endpoint", "state", "differs", "noted"),
    [
        (LOCAL, "established", "", "further packets of 198.51.100.7:5555 go to"),
        ("10.244.9.9:8080", "established", "which is not an endpoint of the Service", ""),
        ("10.244.9.9:8080", "time-wait, assured", "", ""),
        ("10.244.2.6:8080", "established", "", "which gets no new connections"),
        ("10.96.0.7:80", "unreplied", "the address of the Service itself", ""),
    ],
)
def test_open_connections_are_judged(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, state: str, differs: str, noted: str
) -> None:
    entry = LiveConnection("conntrack", f"{OUTSIDE}:5555", "10.96.0.7:80", endpoint, f"{NODE}:999", state, 20)
    mode = mode_named("nftables")
    monkeypatch.setattr(type(mode), "live_connections", lambda *_args: [entry])
    monkeypatch.setattr(type(mode), "remembered", lambda *_args: [Remembered(OUTSIDE, REMOTE, 50)])
    family = family_of("nftables", (SERVICE, ENDPOINTS), SETTINGS)
    found = document("nftables", f"{OUTSIDE}:5555", "10.96.0.7:80", kernel=held_by("nftables", family))
    assert any(differs in line for line in found["differences"]) == bool(differs)
    assert any(noted in line for line in found["flows"][0]["notes"]) or not noted
    assert found["flows"][0]["endpoint"] == REMOTE
    text = "\n".join(connection_lines(found, False))
    rows = {row["line"] for row in found["flows"][0]["kernel"]}
    # Lines of the kernel can be pasted.
    assert rows <= {line[6:] for line in text.splitlines()}
    assert max(len(line) for line in text.splitlines() if line[6:] not in rows) <= 80
    assert f"conntrack: {OUTSIDE}:5555 -> 10.96.0.7:80" in text and ("differs:" in text) == bool(differs)


def test_what_cannot_be_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any) -> Any:
        raise KernelError("not permitted")

    mode = mode_named("nftables")
    for name in ("live_connections", "remembered"):
        monkeypatch.setattr(type(mode), name, refuse)
    module = "ansible_collections.kubenode.proxy.plugins.module_utils.explain.flows.way_to"
    monkeypatch.setattr(module, refuse)
    found = document("nftables", NODE, "10.96.0.7:80", kernel=Kernel(KernelHandles(), refuse))
    assert found["problems"] == ["not permitted"] and found["flows"][0]["sourceIs"].startswith("this node itself")


def test_ends_that_do_not_exist() -> None:
    with pytest.raises(ProxyError, match="without network policies pods are not known"):
        document("nftables", "shop/client", "10.96.0.7:80")
    with pytest.raises(UnknownDestination, match="there is no Service shop/nobody that this node serves"):
        document("nftables", OUTSIDE, "shop/nobody:80")
    with pytest.raises(ProxyError, match="no addresses of the same family"):
        document("nftables", "fd00::1", "10.96.0.7:80")
    assert flow("nftables", OUTSIDE, "shop/web:80")["destination"] == "10.96.0.7"


def test_the_service_of_another_family_is_not_served() -> None:
    service = manifests.service("six", "fd00::7", [manifests.port(80)])
    found = flow("nftables", "fd00::1", "[fd00::7]:80", [service])
    assert (found["verdict"], found["reason"]) == ("not served", "this node does not serve IPv6")
