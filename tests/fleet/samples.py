# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Generated fleets, in the form in which the playbook passes nodes to the report; equal seeds give equal fleets."""

from __future__ import annotations

import random
from typing import Any, Optional, Sequence

from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.document import (
    About,
    Report,
    document,
    make_report,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.fleet.nodes import read_nodes

ENGINE = "0.1.0+4be0c6d2c1b7"
OLD_ENGINE = "0.1.0+91f7a05be3d8"
KERNELS = (
    ("6.1.0-41-amd64", "Debian GNU/Linux 12 (bookworm)", 61),
    ("5.14.0-570.el9.x86_64", "Rocky Linux 9.6 (Blue Onyx)", 24),
    ("6.8.0-85-generic", "Ubuntu 24.04.3 LTS", 11),
    ("6.1.0-37-amd64", "Debian GNU/Linux 12 (bookworm)", 4),
)
REFUSED = (
    ("Service", "shop", "checkout", "spec.ports[0].port", "70000 is not between 1 and 65535"),
    ("EndpointSlice", "media", "transcode-x7k2p", "endpoints[3].addresses[0]", "'10.0.0.' is not an IPv4 address"),
    ("Service", "legacy", "mail_relay", "metadata.name", "'mail_relay' is not a DNS label"),
)
FIREWALLD = "firewalld is running: it removes chains of others when it reloads; use its nftables backend [firewalld]"
OLD_SET = "the set KUBE-CLUSTER-IP of another type is in the way: it is replaced at the next convergence [ipset]"
PREFLIGHT = (
    "kube-proxy is running on this node (process 1742): stop it first, two writers would undo each other's rules "
    "[kube-proxy]"
)
TABLES = {
    "iptables": ("IPv4 chains", "IPv6 chains"),
    "ipvs": ("IPv4 virtual servers", "IPv4 real servers", "IPv4 sets", "IPv4 addresses"),
    "nftables": ("IPv4 table objects", "IPv6 table objects"),
}
CLOCK = 1_782_000_000.0


def refused(entries: Sequence[tuple[str, ...]] = REFUSED) -> list[dict[str, str]]:
    """Return refused objects as service_proxy_info returns them."""
    return [dict(zip(("kind", "namespace", "name", "field", "reason"), entry)) for entry in entries]


def healthy(rng: random.Random, name: str) -> dict[str, Any]:
    """Return the result of service_proxy_info for a healthy node."""
    mode = rng.choices(("nftables", "ipvs", "iptables"), (92, 6, 2))[0]
    kernel, system, _share = rng.choices(KERNELS, [share for _kernel, _system, share in KERNELS])[0]
    return {
        "changed": False,
        "mode": mode,
        "mode_reason": "requested",
        "node_name": name,
        "families": ["IPv4", "IPv6"],
        "variant": "iptables 1.8.9 (nft: the default)" if mode != "nftables" else "",
        "counts": {
            "services": 2140,
            "service_ports": 3312,
            "endpoints": 18406,
            "added": 0,
            "replaced": 0,
            "removed": 0,
        },
        "changes": [],
        "drift": False,
        "summary": "",
        "programmed": {table: 1200 + 731 * place for place, table in enumerate(TABLES[mode])},
        "refused": refused(),
        "refused_count": len(REFUSED),
        "agent_version": ENGINE,
        "kernel": kernel,
        "distribution": system,
        "cautions": [],
        "agent": {
            "running": True,
            "healthy": True,
            "error": "",
            "mode": mode,
            "version": ENGINE,
            "last_sync_age": round(rng.uniform(0.4, 900), 1),
            "syncs": rng.randrange(2000, 90000),
            "drift_repaired": 0,
            "started_from_cache": False,
            "api_server": {"services": "watching", "endpointslices": "watching", "nodes": "watching"},
            "api_server_lost_seconds": {"services": 0.0, "endpointslices": 0.0, "nodes": 0.0},
        },
    }


def drifted(rng: random.Random, result: dict[str, Any]) -> None:
    """Add the drift that another program's changes would cause."""
    table = rng.choice(TABLES[result["mode"]])
    added, replaced = rng.randrange(1, 40), rng.randrange(0, 12)
    result["drift"] = True
    names = [f"KUBE-SVC-{number:04d}" for number in range(min(added + replaced, 10))]
    result["changes"] = [{"table": table, "added": added, "replaced": replaced, "removed": 0, "entries": names}]
    words = [f"{added} missing"] + ([f"{replaced} different"] if replaced else [])
    result["summary"] = f"{table}: {', '.join(words)}"


def entry(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a node; most nodes are healthy."""
    name = f"worker-{number:04d}"
    address = f"10.42.{number // 250}.{number % 250 + 1}"
    reached = {"ping": "pong"}
    fate = rng.random()
    if fate < 0.006:
        message = f"Failed to connect to the host via ssh: connect to host {address} port 22: No route to host"
        return {"name": name, "results": [{"unreachable": True, "msg": message}]}
    result = healthy(rng, name)
    if fate < 0.010:
        failure = {"failed": True, "msg": PREFLIGHT, "error_kind": "preflight"}
        kept = ("kernel", "distribution", "agent_version")
        return {"name": name, "results": [reached, {**failure, **{key: result[key] for key in kept}, "agent": {}}]}
    if fate < 0.017:
        drifted(rng, result)
    elif fate < 0.020:
        result["agent"].update(healthy=False, error="iptables-restore: line 3127 failed")
        drifted(rng, result)
    elif fate < 0.022:
        result["agent"] = {"running": False, "error": "/run/kubenode-proxy/agent/agent.sock: no agent answers"}
    elif fate < 0.028:
        result["agent"]["last_sync_age"] = 3600.0 * rng.randrange(5, 70)
    elif fate < 0.040:
        result["cautions"] = [rng.choice((FIREWALLD, FIREWALLD, OLD_SET))]
    elif fate < 0.075:
        result["agent_version"] = result["agent"]["version"] = OLD_ENGINE
    return {"name": name, "results": [reached, {"skipped": True}, result]}


def fleet(number: int = 1000, seed: int = 20) -> list[dict[str, Any]]:
    """Return a fleet of that many nodes."""
    rng = random.Random(seed)
    return [entry(rng, place) for place in range(1, number + 1)]


def earlier(number: int = 1000) -> dict[str, Any]:
    """Return the document of a report of the same fleet some minutes before, when fewer nodes had drifted."""
    entries = fleet(number)
    for item in entries[: number // 2]:
        for result in item["results"]:
            result.pop("unreachable", None)
            if result.get("drift"):
                result.update(drift=False, changes=[], summary="")
    found: dict[str, Any] = document(make_report(read_nodes(entries), About(generated=CLOCK - 600.0, engine=ENGINE)))
    return found


def report(entries: list[dict[str, Any]], previous: Optional[dict[str, Any]] = None) -> Report:
    """Return the report of these entries, always with the same time of creation."""
    about = About(generated=CLOCK, collection_version="0.1.0", engine=ENGINE)
    return make_report(read_nodes(entries), about, previous)
