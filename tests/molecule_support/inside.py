# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Set-up of a node by its own systemd units: ``python3 -m tests.molecule_support.inside network
pods``.

``network`` gives the node its address and the routes to other nodes' pods, as a cluster's network plugin does;
``pods`` creates the pods' network namespaces and answers in them. Both read /opt/lab/node.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Sequence

from tests.lab import echo, system
from tests.lab.node import make_pods

PLACE = Path("/opt/lab")


def _network(node: Any) -> None:
    system.run(["hostname", node["name"]])
    Path("/etc/hostname").write_text(node["name"] + "\n", encoding="ascii")
    for key, value in node["sysctls"].items():
        Path("/proc/sys", key).write_text(value, encoding="ascii")
    system.ip_batch(["link set lo up", *node["network"]])
    if node["iptables"]:
        for family in ("iptables", "ip6tables"):
            system.run(["update-alternatives", "--set", family, f"/usr/sbin/{family}-{node['iptables']}"])


def _pods(node: Any) -> None:
    Path("/run/netns").mkdir(exist_ok=True)
    for name in os.listdir("/run/netns"):
        subprocess.run(["ip", "netns", "del", name], check=True)
    for number in range(len(node["pods"])):
        subprocess.run(["ip", "link", "del", f"veth{number}"], check=False, stderr=subprocess.DEVNULL)
    make_pods(node["pods"])
    servers = PLACE / "echo.json"
    sys.exit(echo.main([str(servers)]))


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    node = json.loads((PLACE / "node.json").read_text(encoding="utf-8"))
    {"network": _network, "pods": _pods}[arguments[0]](node)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
