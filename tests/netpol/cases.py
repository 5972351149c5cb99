# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test cases of network policies: small clusters in YAML, probes of the network, and the reason for each verdict.

``cases/common.yaml`` holds the cluster that all cases start from. A case has ``objects`` (added, or replacing those of
the same name), ``without``, ``flows`` and ``steps``; a step has ``delete``, ``apply``, ``held``, ``flows``, ``open``.
"""

from __future__ import annotations

import functools
import ipaddress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .network import CLIENTS, NODES, pod
from .wire import Probe

DIRECTORY = Path(__file__).parent / "cases"
FAMILIES = ("ipv4", "ipv6")
Objects = dict[tuple[str, str, str], dict[str, Any]]


class Expectation(NamedTuple):
    """A flow in one family, and whether it must be allowed."""

    text: str
    probe: Probe
    allowed: bool
    why: str


def names() -> list[str]:
    """Return the names of all cases."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml") if path.stem != "common")


@functools.cache
def _loaded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.load((DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    return content


def key_of(item: dict[str, Any]) -> tuple[str, str, str]:
    """Return kind, namespace and name."""
    return item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _key_of_text(text: str) -> tuple[str, str, str]:
    parts = text.split("/")
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else (parts[0], "", parts[1])


class Step(NamedTuple):
    """The objects from this step on, and the flows to probe."""

    objects: Objects
    held: list[dict[str, str]]
    flows: list[dict[str, str]]
    open: list[dict[str, str]]


def steps(name: str) -> list[Step]:
    """Return the steps of a case; the first one is its initial state."""
    case = _loaded(name)
    objects = {key_of(item): item for item in _loaded("common")["objects"]}
    for text in case.get("without", ()):
        del objects[_key_of_text(text)]
    objects.update({key_of(item): item for item in case.get("objects", ())})
    found = [Step(dict(objects), [], case.get("flows", []), [])]
    for step in case.get("steps", ()):
        for text in step.get("delete", ()):
            del objects[_key_of_text(text)]
        objects.update({key_of(item): item for item in step.get("apply", ())})
        found.append(Step(dict(objects), step.get("held", []), step.get("flows", []), step.get("open", [])))
    return found


class End(NamedTuple):
    """An end of a flow: its network namespace, and its address in each family."""

    host: str
    addresses: dict[str, str]


def _by_family(addresses: list[str]) -> dict[str, str]:
    return {"ipv6" if ":" in address else "ipv4": address for address in addresses}


def host_of(address: str) -> str:
    """Return the network namespace that answers for an address."""
    value = ipaddress.ip_address(address)
    parts = value.exploded.split(":") if value.version == 6 else address.split(".")
    if value.version == 6:
        prefix = value.compressed
        if prefix.startswith("2001:db8:113:"):
            return "client"
        last = int(parts[7], 16)
        if prefix.startswith("fd00:172:18:"):
            return next(name for name, number in NODES.items() if number == last)
        subnet, number = int(parts[3], 16), int(format(last, "x"))
    else:
        if parts[0] == "203":
            return "client"
        if parts[0] == "172":
            return next(name for name, number in NODES.items() if number == int(parts[3]))
        subnet, number = int(parts[2]), int(parts[3])
    if subnet != 1:
        return f"node{subnet}"
    return "node1" if number == 1 else pod(number)


def _end(text: str, objects: Objects) -> End:
    if text in NODES:
        return End(text, {"ipv4": f"172.18.0.{NODES[text]}", "ipv6": f"fd00:172:18::{NODES[text]}"})
    if text == "gateway":
        return End("node1", {"ipv4": "10.244.1.1", "ipv6": "fd00:10:244:1::1"})
    if text in CLIENTS:
        value, suffix = CLIENTS[text]
        return End("client", {"ipv4": f"203.0.113.{value}", "ipv6": f"2001:db8:113::{suffix}"})
    if "/" in text:
        namespace, name = text.split("/")
        item = objects["Pod", namespace, name]
        addresses = [entry["ip"] for entry in item["status"]["podIPs"]]
        return End(host_of(addresses[0]), _by_family(addresses))
    return End(host_of(text), _by_family([text]))


def _target(text: str, objects: Objects) -> tuple[dict[str, str], int]:
    kind, _slash, rest = text.partition("/")
    if kind in ("service", "nodeport"):
        namespace, name = rest.split("/")
        spec = objects["Service", namespace, name]["spec"]
        port = spec["ports"][0]
        if kind == "service":
            return _by_family(spec["clusterIPs"]), port["port"]
        return _end("node1", objects).addresses, port["nodePort"]
    try:
        ipaddress.ip_address(text)
        return _by_family([text]), 0
    except ValueError:
        end, _colon, port_text = text.rpartition(":")
    if not end:
        return _end(text, objects).addresses, 0
    return _end(end, objects).addresses, int(port_text)


def probes_of(flow: str, objects: Objects) -> dict[str, Probe]:
    """Return a flow's probes by family: each family in which both ends have an address, or the one named."""
    words = flow.split()
    protocol, source, _arrow, target = words[:4]
    wanted = (words[4],) if len(words) > 4 else FAMILIES
    end = _end(source, objects)
    addresses, port = _target(target, objects)
    return {
        family: Probe(protocol, end.host, end.addresses[family], addresses[family], port)
        for family in wanted
        if family in end.addresses and family in addresses
    }


def expectations(step: Step, families: tuple[str, ...] = FAMILIES) -> list[Expectation]:
    """Return the expectations of a step in these families."""
    return [
        Expectation(f"{flow['flow']} {family}", probe, flow["expect"] == "allowed", flow["why"])
        for flow in step.flows
        for family, probe in probes_of(flow["flow"], step.objects).items()
        if family in families
    ]
