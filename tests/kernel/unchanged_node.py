# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node on which runs of the module service_proxy end early, and what changes on it."""

from __future__ import annotations

import gzip
import subprocess
import time
from pathlib import Path
from typing import Any

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.snapshot import canonical_snapshot
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.unchanged import decision, record
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules.modules import loaded_modules
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import proxy_spec, source_spec
from ansible_collections.kubenode.proxy.plugins.modules import service_proxy
from tests.kernel.convergence_node import endpoint_slices, service
from tests.lab import system

NODE = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": "node-1"}, "status": {"addresses": []}}
OBJECTS: list[Any] = [
    NODE,
    service("plain", 1),
    service("named", 2, protocol="UDP"),
    *endpoint_slices("plain", 1, 3),
    *endpoint_slices("named", 2, 2, "UDP"),
]
#: The interface of the node with its primary address.
ETH0 = ["link add eth0 type veth peer name peer0", "address add 192.0.2.1/24 dev eth0"]


class StandIn:
    """Stands in for AnsibleModule: options with their defaults, and the warnings."""

    def __init__(self, options: dict[str, Any], check: bool, diff: bool) -> None:
        spec: dict[str, Any] = {**source_spec(), **proxy_spec()}
        self.params = {**{name: item.get("default") for name, item in spec.items()}, **options}
        self.check_mode, self._diff = check, diff
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class Node:
    """Runs the module on a node: the network namespace, with a new interface, and files in a scratch directory."""

    def __init__(self, directory: Path) -> None:
        system.ip_batch([*ETH0, "link set eth0 up"])
        self.state = directory / "state"
        self.snapshot = directory / "snapshot.json.gz"
        self.static = directory / "services.d"
        self.static.mkdir()
        self.write(OBJECTS)
        self.options: dict[str, Any] = {
            "state": "present",
            "snapshot": str(self.snapshot),
            "node_name": "node-1",
            "mode": "nftables",
            "configuration": {"nodePortAddresses": ["primary"]},
            "node_configuration": {"staticServices": {"directory": str(self.static)}},
            "state_directory": str(self.state),
            "history_directory": str(directory / "history"),
            "keep_states": 5,
            "boot": None,
            "confirm_timeout": 0.0,
            "max_unserved_percent": 50.0,
            "unattended": False,
            "always_observe": False,
            "ignore_findings": ["incomplete-snapshot"],
        }

    @property
    def record(self) -> Path:
        return self.state / record.FILE

    def write(self, objects: list[Any]) -> None:
        """Write the snapshot, older than a moment, so that a record of it is possible."""
        self.snapshot.write_bytes(gzip.compress(canonical_snapshot(objects)[0], mtime=0))
        time.sleep(0.06)

    def run(self, check: bool = False, diff: bool = False, **more: Any) -> dict[str, Any]:
        """Run the module and return its result, with its warnings."""
        module = StandIn({**self.options, **more}, check, diff)
        result = service_proxy.perform(module)  # type: ignore[arg-type]
        return {**result, "warnings": module.warnings}

    def settle(self, **more: Any) -> dict[str, Any]:
        """Run until a run ends early, and return its result: the second, or the third if the first loads modules."""
        before = set(loaded_modules())
        self.run(**more)
        if set(loaded_modules()) != before:
            self.run(**more)
        result = self.run(**more)
        assert not result["observed"] and not result["changed"], result
        return result

    def must_observe(self, what: str, **more: Any) -> dict[str, Any]:
        """Check that the next run is complete."""
        result = self.run(**more)
        assert result["observed"], what
        return result


def nft(*lines: str) -> None:
    subprocess.run(["nft", "-f", "-"], input="\n".join(lines), text=True, check=True)


TIMEOUT = "net.netfilter.nf_conntrack_tcp_timeout_close_wait"


def set_timeout(seconds: int) -> None:
    write(f"/proc/sys/{TIMEOUT.replace('.', '/')}", str(seconds))


def write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="ascii")


def ask(node: Node, lock_timeout: float = 1.0) -> decision.Decision:
    """Ask whether a run may end early, without a run."""
    options = StandIn(node.options, False, False).params
    return decision.decide(decision.Question(options, [str(node.snapshot)], str(node.state), lock_timeout))
