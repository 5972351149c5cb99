# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Helpers for tests of the agent on a node: its process, its log, the programmed state, and traffic through it."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any, Callable

from tests.molecule_support import portrait
from tests.waiting import wait_for

from .cluster import POD, Cluster
from .node import Node

UNIT = "kubenode-proxy.service"
INSIDE = Path(__file__).parent / "inside"


def start_of(node: Node) -> dict[str, str]:
    """Return the unit's main process ID and start time."""
    found = node.unit(UNIT, "MainPID", "ExecMainStartTimestampMonotonic")
    assert found["MainPID"] != "0", node.journal()
    return found


def wait_for_activity(node: Node) -> None:
    """Wait until the agent has notified systemd that it is ready."""
    wait_for(lambda: node.unit(UNIT, "ActiveState")["ActiveState"] == "active", what=f"{UNIT} is active")


def differs(node: Node) -> bool:
    """Return whether the kernel differs from the API server's state, as the node's own command reports."""
    done = node.run("kubenode-proxy", "diff", "--kubeconfig", "/etc/kubenode-proxy/kubeconfig", check=False)
    assert done.returncode in (0, 3), done.stderr + node.journal()
    return done.returncode == 3


def wait_until_converged(node: Node, seconds: float = 120.0) -> None:
    """Wait until the kernel has the desired state."""
    wait_for(lambda: not differs(node), seconds, what="the kernel equals the plan")


def status(node: Node) -> dict[str, Any]:
    """Return the status document of the agent, which may have an error."""
    done = node.run("kubenode-proxy", "status", "--output", "json", check=False)
    assert done.returncode in (0, 4), done.stderr
    return dict(json.loads(done.stdout))


def dataplane(node: Node) -> list[str]:
    """Return the rules of all programs, sorted, without counters and handles."""
    lines = []
    for program in ("iptables-save", "ip6tables-save"):
        lines += [line for line in node.output(program).splitlines() if line.startswith("-A")]
    text = node.output("nft", "--stateless", "list", "ruleset")
    # nft prints the rules of iptables-nft with counters, and they are listed already.
    tables = re.split(r"^(?=table )", text, flags=re.MULTILINE)
    mine = [table for table in tables if not re.match(r"table ip6? (nat|filter|mangle|raw|security) ", table)]
    # The order of a set's elements is arbitrary.
    return sorted([*lines, *(word for table in mine for word in re.split(r"[\n,]", table))])


class KubeProxy:
    """A kube-proxy in the network namespace of a node, as a program of root; a context manager."""

    PATH = "/tmp/kube-proxy"
    UNIT = "kube-proxy.service"

    def __init__(self, node: Node) -> None:
        self._node = node

    def __enter__(self) -> KubeProxy:
        self._node.copy(INSIDE / "kube_proxy.py", self.PATH)
        self._node.run("chmod", "755", self.PATH)
        self._node.run("systemd-run", f"--unit={self.UNIT}", "--collect", self.PATH)
        wait_for(self.serves, what="kube-proxy writes its chains")
        return self

    def serves(self) -> bool:
        """Return whether its chains are there."""
        return "-A KUBE-SVC-STANDIN " in self._node.output("iptables-save", "-t", "nat")

    def __exit__(self, *_error: object) -> None:
        self._node.run("systemctl", "stop", self.UNIT)


def rules(node: Node) -> str:
    """Return the rules of the table nat of IPv4."""
    return node.output("iptables-save", "-t", "nat")


def mark(node: Node) -> str:
    """Return the current position in the journal, for :func:`log_since`."""
    return node.output("journalctl", "--no-pager", "-n", "0", "--show-cursor").rsplit(": ", 1)[1].strip()


def log_since(node: Node, cursor: str) -> str:
    """Return what the agent has logged since the position."""
    return node.log(UNIT, f"--after-cursor={cursor}")


def picture(node: Node) -> dict[str, Any]:
    """Return the state of the node: users, units, files, rules, and every path on its disk with mode and owner."""
    found = dict(json.loads(node.output("python3", "-", text=Path(portrait.__file__).read_text())))
    # podman assigns these again with each start of the container.
    found["addresses"] = [line for line in found["addresses"] if not line.startswith("eth0 ")]
    del found["boot"], found["files"]["/etc/hosts"]
    passing = ("/tmp", "/var/tmp", "/var/log", "/var/lib/systemd", "/root/.ansible", "/var/cache", "/run")
    skip = [word for path in passing for word in ("-path", path, "-prune", "-o")]
    listing = node.output("find", "/", "-xdev", *skip, "-not", "-name", "*-", "-printf", "%p %M %U:%G\n")
    found["paths"] = sorted(listing.splitlines())
    # Any caller of iptables-legacy creates the lock file; only its owner matters.
    found["run"] = node.output("find", "/run", "-name", "kubenode*").splitlines()
    found["lock"] = (
        node.run("stat", "-c", "%A %U:%G", "/run/xtables.lock", check=False).stdout or "-rw------- root:root\n"
    )
    found["users"] = node.output("getent", "passwd").splitlines() + node.output("getent", "group").splitlines()
    return found


def start_pod(node: Node) -> None:
    """Create the pod that is the endpoint of the cluster's first Services, on a separate link."""
    node.write("/srv/pod.py", (INSIDE / "pod.py").read_text())
    for command in (
        "netns add pod",
        "link add pod0 type veth peer name eth0 netns pod",
        "addr add 169.254.1.1/32 dev pod0",
        "link set pod0 up",
        f"route add {POD}/32 dev pod0 src 169.254.1.1",
        "-n pod link set lo up",
        f"-n pod addr add {POD}/32 dev eth0",
        "-n pod link set eth0 up",
        "-n pod route add 169.254.1.1 dev eth0",
        "-n pod route add default via 169.254.1.1 dev eth0",
    ):
        node.run("ip", *command.split())
    pod = node.begin("ip", "netns", "exec", "pod", "python3", "/srv/pod.py")
    assert pod.stdout is not None
    assert pod.stdout.readline() == "ready\n"


class Flows:
    """A TCP connection and a UDP flow to a Service, in use until closed. The node must have /srv/flows.py."""

    def __init__(self, node: Node, address: str, port: int = 80) -> None:
        self._node = node
        self._address = address
        self._process = node.begin("python3", "/srv/flows.py", address, str(port))

    def _said(self) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        said = dict(json.loads(self._process.stdout.readline()))
        assert said["error"] == "", said
        return said

    def exchanges(self) -> int:
        """Return the number of exchanges so far. Raises AssertionError if one has failed."""
        return int(self._said()["exchanges"])

    def wait_for_more(self) -> None:
        """Wait until more exchanges have succeeded."""
        before = self.exchanges()
        wait_for(lambda: self.exchanges() > before + 3, what="traffic flows")

    def entries(self) -> list[str]:
        """Return protocol and identity of both flows in the kernel's conntrack table."""
        found = []
        for protocol, port in zip(("tcp", "udp"), self._said()["ports"]):
            only = ("-p", protocol, "-d", self._address, "--orig-port-src", str(port), "-o", "id")
            for line in self._node.output("conntrack", "-L", *only).splitlines():
                found.append(f"{protocol} {line.rsplit('id=', 1)[1].strip()}")
        return found

    def close(self) -> None:
        """Stop the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Holder:
    """A process on the node, other than the agent, that holds the xtables lock."""

    def __init__(self, node: Node) -> None:
        self._process = node.begin("flock", "-x", "/run/xtables.lock", "sh", "-c", "echo held; read line")
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "held\n"

    def release(self) -> None:
        """Release the lock."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Churn:
    """Change a cluster from a thread: ``change(number)`` returns the objects to put, ``rate`` times a second."""

    def __init__(self, cluster: Cluster, change: Callable[[int], list[dict[str, Any]]], rate: float) -> None:
        self.cluster = cluster
        self._change = change
        self._rate = rate
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        number = 0
        while not self._ending.wait(1 / self._rate):
            for item in self._change(number):
                self.cluster.store.put(item)
            number += 1

    def __enter__(self) -> Churn:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ending.set()
        self._thread.join()


def paced(rate: float, number: int, began: float) -> None:
    """Wait until change ``number`` is due at ``rate`` per second since ``began``; return at once if it is late."""
    ahead = number / rate - (time.monotonic() - began)
    if ahead > 0:
        time.sleep(ahead)


def resident_kibibytes(node: Node) -> int:
    """Return the agent's resident memory in KiB."""
    text = node.output("cat", f"/proc/{start_of(node)['MainPID']}/status")
    found = re.search(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, text
    return int(found.group(1))
