# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state that kube-proxy v1.36.2 had programmed at each step of the conformance cases, for rendering tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple, Optional

import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import family_of
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import LocalTraffic

CASES = Path(__file__).resolve().parents[1] / "conformance" / "cases"
_SECTION = re.compile(r"^### (\d+) .*: (.+)$")
_CLUSTER_CIDRS = "10.244.0.0/16,fd00:10:244::/48"


class Step(NamedTuple):
    """One step of a case: objects, the KubeProxyConfiguration in effect, recorded text by command."""

    case: str
    number: int
    objects: list[Any]
    config: Mapping[str, Any]
    saved: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.case}-{self.number}"

    def local_traffic(self, family: str, pod_cidrs: tuple[str, ...]) -> Optional[LocalTraffic]:
        """Return how the node of the step detects its pods' traffic."""
        mode = self.config.get("detectLocalMode", "ClusterCIDR")
        if mode == "BridgeInterface":
            return LocalTraffic("bridge", self.config["detectLocal"]["bridgeInterface"])
        if mode == "InterfaceNamePrefix":
            return LocalTraffic("prefix", self.config["detectLocal"]["interfaceNamePrefix"])
        cidrs = pod_cidrs if mode == "NodeCIDR" else self.config["clusterCIDR"].split(",")
        of_family = [cidr for cidr in cidrs if cidr and family_of(cidr) == family]
        return LocalTraffic("cidr", of_family[0]) if of_family else None


def recorded(path: Path) -> dict[int, dict[str, str]]:
    """Return the text of each command by the number of the step."""
    texts: dict[int, dict[str, list[str]]] = {}
    lines: list[str] = []
    for line in path.read_text().splitlines():
        section = _SECTION.match(line)
        if section:
            lines = texts.setdefault(int(section.group(1)), {}).setdefault(section.group(2), [])
        else:
            lines.append(line)
    return {number: {name: "\n".join(value) for name, value in found.items()} for number, found in texts.items()}


def steps(mode: str) -> Iterator[Step]:
    """Yield the steps recorded in a mode while kube-proxy ran and no other program had changed its rules."""
    for folder in sorted(CASES.iterdir()):
        state = folder / f"state-{mode}.txt"
        if not state.exists():
            continue
        case = yaml.safe_load((folder / "case.yaml").read_text())
        snapshots = json.loads((folder / "snapshots.json").read_text())
        saved = recorded(state)
        cluster_cidr = {"ipv6": "fd00:10:244::/48"}.get(case.get("families", "dual"), _CLUSTER_CIDRS)
        config: dict[str, Any] = {"clusterCIDR": cluster_cidr, **(case.get("config") or {})}
        for number, description in enumerate([{}, *(case.get("steps") or [])]):
            config.update(description.get("config") or {})
            usual = not description.get("stop") and not description.get("cleanup") and not description.get("exec")
            if usual and number in saved and number < len(snapshots):
                yield Step(folder.name, number, snapshots[number], dict(config), saved[number])
