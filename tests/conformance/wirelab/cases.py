# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cases: a folder with the cluster, the steps, the flows, and the recordings."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import sentinel
from .addressing import CLUSTER_CIDR, holder
from .corrections import CORRECTED, EQUALS, KUBE_PROXY, RECORDED, corrected, read_corrections
from .endpoints import Listener
from .flows import TRANSPORTS, Flow, parse_flow
from .objects import Object, flatten, load_yaml, merge
from .results import StepResult
from .snapshots import snapshots_of

MODES = ("iptables", "nftables", "ipvs")
#: A mode that kube-proxy no longer has -> the mode with whose recordings it is compared.
COMPARED_WITH = {"userspace": "ipvs"}
FAMILIES = {"dual": (4, 6), "ipv4": (4,), "ipv6": (6,)}
ZONE_LABEL = "topology.kubernetes.io/zone"
SECONDS_FOR_DROP = 3.0
#: Of the annotations and labels that only this project reads.
OWN_PREFIX = "kubenode.proxy/"


class ZoneHint(NamedTuple):
    """The zone that the sentinel is hinted at, None for no hint, and whether the node is (still) in a zone."""

    zone: str | None
    node_has_zone: bool


@dataclass
class Step:
    """One state of the cluster and its flows. See the README for the meaning of each part."""

    name: str
    apply: list[Object]
    delete: list[str]
    commands: list[str]
    config: dict[str, Any] | None
    node_config: dict[str, Any] | None
    restart: bool
    kill: bool
    stop: bool
    cleanup: bool
    wait: float
    flows: list[Flow]


@dataclass
class Case:
    """A case. *path* is where its data comes from; *name* is what reports call it; *suites* are those it belongs to.

    *needs_agent*: what it shows is served by a process that keeps running, not by one convergence in each step.
    """

    name: str
    path: str
    description: str
    node: str
    modes: Sequence[str]
    config: dict[str, Any]
    pod_network: str
    families: Sequence[int]
    steps: list[Step]
    extra_listeners: list[Listener] = field(default_factory=list)
    node_config: dict[str, Any] = field(default_factory=dict)
    suites: Sequence[str] = ()
    needs_agent: bool = False

    @property
    def needs_own_features(self) -> bool:
        """Does the case need what this project has and kube-proxy has not, in its configuration or its objects?"""
        configured = self.node_config or any(step.node_config for step in self.steps)
        return bool(configured) or any(OWN_PREFIX in json.dumps(step.apply) for step in self.steps)

    def file(self, name: str) -> str:
        """Return the path of a file of the case."""
        return os.path.join(self.path, name)

    def snapshots(self) -> list[list[Object]]:
        """Return the objects as the API served them, one list for each step.

        For a case that was never recorded these are the case's own objects, completed as an API server would.
        """
        return snapshots_of(self)

    def expected(self, mode: str, behaviour: str = KUBE_PROXY, filter_backend: str = "") -> list[StepResult]:
        """Return the expected results of a mode: the recording, or else those written from the specification.

        What later releases of kube-proxy do differently is applied, except to what was recorded; with corrected
        behaviour the corrections; and in ipvs mode what differs with the filter backend.
        Raises FileNotFoundError if there is neither recording nor specification.
        """
        recording = self.file(f"observed-{mode}.json")
        path = recording if os.path.exists(recording) else self.file(f"expected-{mode}.json")
        with open(path, encoding="utf-8") as file:
            steps: list[StepResult] = json.load(file)["steps"]
        if behaviour != RECORDED:
            steps = corrected(steps, read_corrections(self.file(f"kube-proxy-{EQUALS}-{mode}.json")))
        if behaviour == CORRECTED:
            steps = corrected(steps, read_corrections(self.file(f"corrected-{mode}.json")))
        if mode == "ipvs" and filter_backend:
            steps = corrected(steps, read_corrections(self.file(f"filter-backend-{filter_backend}.json")))
        return steps

    def zone_hint(self, number: int) -> ZoneHint:
        """Return the hint of the sentinel as of a step."""
        zones = [
            (item["metadata"].get("labels") or {}).get(ZONE_LABEL)
            for step in self.steps[: number + 1]
            for item in step.apply
            if item["kind"] == "Node" and item["metadata"]["name"] == self.node
        ]
        known = [zone for zone in zones if zone]
        return ZoneHint(known[-1], bool(zones[-1])) if known else ZoneHint(None, False)

    def listeners(self) -> set[Listener]:
        """Return everything that must answer: endpoints, the sentinel, and the fabric for whatever flows send to."""
        found = set(self.extra_listeners)
        for step in self.steps:
            found.update(_endpoint_listeners(step.apply))
            found.update(Listener("fabric", flow.kind, flow.port) for flow in step.flows if flow.kind in TRANSPORTS)
        for number in range(len(self.steps)):
            for announced in (number, sentinel.SECOND + number):
                found.add(Listener("peer", "tcp", sentinel.endpoint_port(announced)))
                found.add(Listener("fabric", "tcp", sentinel.service_port(announced)))
        return found

    def proxy_configuration(self, mode: str, kubeconfig: str, changes: dict[str, Any] | None) -> dict[str, Any]:
        """Return the KubeProxyConfiguration of the case, with the *changes* that its steps made."""
        base: dict[str, Any] = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": mode,
            "hostnameOverride": self.node,
            "clientConnection": {"kubeconfig": kubeconfig, "contentType": "application/json"},
            "clusterCIDR": ",".join(CLUSTER_CIDR[family] for family in self.families),
            "healthzBindAddress": "0.0.0.0:10256",
            "metricsBindAddress": "0.0.0.0:10249",
            # The sysctls of conntrack belong to the machine, not to the namespace.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }
        base.update({name: {"minSyncPeriod": "50ms"} for name in MODES})
        return merge(merge(base, self.config), changes)

    def node_configuration(
        self, behaviour: str, changes: dict[str, Any] | None, ipvs_filter_backend: str = ""
    ) -> dict[str, Any] | None:
        """Return the NodeProxyConfiguration of the case, with the *changes* of its steps; None if it needs none."""
        settings = merge(self.node_config, changes)
        if ipvs_filter_backend:
            settings = {"ipvsFilterBackend": ipvs_filter_backend, **settings}
        if behaviour == CORRECTED:
            settings = {"behaviour": behaviour, **settings}
        if not settings:
            return None
        return {"apiVersion": "kubenode.proxy/v1alpha1", "kind": "NodeProxyConfiguration", **settings}

    def expected_seconds(self, mode: str) -> float:
        """Return a rough estimate of how long the case takes, to start the longest first."""
        seconds = 0.0
        for step in self.steps:
            waits = [
                float(flow.options.get("gap", 0)) * (flow.fixed_tries or 1) for flow in step.flows if flow.wanted(mode)
            ]
            seconds += 1 + step.wait + sum(waits)
        for step_result in self.expected(mode):
            dropped = [result for result in step_result["flows"] if "drop" in result.get("outcomes", {})]
            one_by_one = sum(
                sum(result["outcomes"].values()) for result in dropped if parse_flow(result["flow"]).ordered
            )
            seconds += SECONDS_FOR_DROP * (one_by_one + bool(dropped))
        return seconds


def _endpoint_listeners(items: Iterable[Object]) -> Iterable[Listener]:
    for item in items:
        if item["kind"] != "EndpointSlice" or item.get("addressType") == "FQDN":
            continue
        addresses = [address for endpoint in item.get("endpoints") or [] for address in endpoint["addresses"]]
        for host in {holder(address) for address in addresses} - {None}:
            for port in item.get("ports") or []:
                if host and port.get("port"):
                    yield Listener(host, port.get("protocol", "TCP").lower(), port["port"])


def load_case(path: str) -> Case:
    """Read a case. ValueError or KeyError, with the path, for what is not one."""
    document = load_yaml(os.path.join(path, "case.yaml"))[0]
    cluster = flatten(load_yaml(os.path.join(path, "cluster.yaml")))
    first = {"name": "start", "apply": cluster, "flows": document.get("flows", []), "exec": document.get("exec", [])}
    try:
        steps = [_load_step(path, number, step) for number, step in enumerate([first, *document.get("steps", [])])]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"case {path}: {error}") from error
    listeners = []
    for text in document.get("listen", []):
        host, protocol, port = text.split()
        listeners.append(Listener(host, protocol, int(port)))
    return Case(
        name=os.path.basename(path.rstrip("/")),
        path=path,
        description=document.get("description", ""),
        node=document.get("node", "node1"),
        modes=document.get("modes", list(MODES)),
        config=document.get("config", {}),
        pod_network=document.get("podNetwork", "ptp"),
        families=FAMILIES[document.get("families", "dual")],
        steps=steps,
        extra_listeners=listeners,
        node_config=document.get("nodeConfig", {}),
        suites=document.get("suites", ()),
        needs_agent=bool(document.get("needsAgent")),
    )


def _load_step(path: str, number: int, document: dict[str, Any]) -> Step:
    items = document.get("apply")
    if isinstance(items, str):
        items = load_yaml(os.path.join(path, items))
    return Step(
        name=document.get("name", f"step{number}"),
        apply=flatten(items),
        delete=document.get("delete") or [],
        commands=document.get("exec") or [],
        config=document.get("config"),
        node_config=document.get("nodeConfig"),
        restart=bool(document.get("restart")),
        kill=bool(document.get("kill")),
        stop=bool(document.get("stop")),
        cleanup=bool(document.get("cleanup")),
        wait=float(document.get("wait") or 0),
        flows=[parse_flow(text) for text in document.get("flows") or []],
    )


def find_cases(directories: Iterable[str], patterns: Sequence[str]) -> list[Case]:
    """Return the cases whose names match one of the patterns, by name within each directory."""
    found = []
    for directory in directories:
        for path in sorted(glob.glob(os.path.join(directory, "*", "case.yaml"))):
            folder = os.path.dirname(path)
            if any(fnmatch.fnmatch(os.path.basename(folder), pattern) for pattern in patterns):
                found.append(load_case(folder))
    return found
