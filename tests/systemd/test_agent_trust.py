# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits of a compromised agent on its node: it can reach no file of root, nor any path to root privileges."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.waiting import wait_for

from .agent import UNIT, differs, start_of, start_pod, status, wait_for_activity
from .cluster import POD, Cluster, endpoint_slice, service
from .node import Node

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "legacy": {"mode": "iptables"},
    "nft": {"mode": "iptables"},
    "nftables": {"mode": "nftables"},
}
OTHER = "/srv/other.sock"
SOCKETS = (OTHER, "/run/other.sock", "/run/containerd/containerd.sock", "/run/docker.sock", "/run/crio/crio.sock")
# A container runtime's socket as containerd creates it: root:root 0660.
RUNTIMES = f"""
import os, socket, sys, threading
def serve(listener):
    while True:
        listener.accept()[0].sendall(b"you are root")
for path in {SOCKETS!r}:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chown(path, 0, 0)
    os.chmod(path, 0o660)
    listener.listen()
    threading.Thread(target=serve, args=(listener,)).start()
open("/srv/runtimes-serve", "w").close()
"""
ASK = """
import json, os, socket, sys
found = {}
for path in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
            found[path] = sock.recv(100).decode()
        except OSError as error:
            found[path] = type(error).__name__
print(json.dumps(found))
"""


FULL = pytest.mark.full


@pytest.fixture(
    scope="module", params=[pytest.param("legacy", marks=FULL), "nft", pytest.param("nftables", marks=FULL)]
)
def member(request, start):
    """Provide a node with sockets of container runtimes, its cluster, and the variables of the role."""
    node = start(f"trust-{request.param}")
    if request.param == "legacy":
        for program in ("iptables", "ip6tables"):
            node.run("update-alternatives", "--set", program, f"/usr/sbin/{program}-legacy")
        node.run("nft", "flush", "ruleset")
    node.write("/srv/runtimes.py", RUNTIMES)
    serving = node.begin("python3", "/srv/runtimes.py")
    wait_for(
        lambda: not node.run("test", "-e", "/srv/runtimes-serve", check=False).returncode, what="the sockets are there"
    )
    start_pod(node)
    cluster = Cluster(node.scratch, [node.name])
    for item in (service("echo", "10.96.0.20"), endpoint_slice("echo", [POD])):
        cluster.store.put(item)
    variables = {"agent_kubeconfig": str(cluster.kubeconfig), "agent_configuration": CONFIGURATIONS[request.param]}
    node.role("agent", variables)
    yield request.param, node, cluster, variables
    serving.kill()
    serving.wait()
    cluster.close()


def identity(node: Node) -> dict[str, str]:
    text = node.output("cat", f"/proc/{start_of(node)['MainPID']}/status")
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def as_the_agent(node: Node, code: str, *arguments: str) -> dict[str, str]:
    """Run Python code with the agent's user, groups, capabilities and mounts, and return its JSON output."""
    fields, pid = identity(node), start_of(node)["MainPID"]
    groups = ",".join(fields["Groups"].split())
    become = ["setpriv", f"--reuid={fields['Uid'].split()[0]}", f"--regid={fields['Gid'].split()[0]}"]
    become += [f"--groups={groups}"] if groups else ["--clear-groups"]
    become += ["--inh-caps=-all,+net_admin,+net_raw", "--ambient-caps=+net_admin,+net_raw"]
    become += ["--bounding-set=-all,+net_admin,+net_raw", "--no-new-privs"]
    return dict(json.loads(node.output("nsenter", "-t", pid, "-m", "-n", *become, "python3", "-c", code, *arguments)))


def test_the_agent_serves_without_the_group_root(member):
    name, node, cluster, _variables = member
    wait_for_activity(node)
    fields = identity(node)
    assert "0" not in fields["Groups"].split() and "0" not in fields["Gid"].split()
    assert status(node)["mode"] == CONFIGURATIONS[name]["mode"]
    assert not differs(node)
    if name == "nftables":
        return
    # In the variant that the node uses, and repaired there.
    save, program = f"iptables-{name}-save", f"iptables-{name}"
    served = f"--to-destination {POD}:8080"
    assert served in node.output(save, "-t", "nat")
    node.run(program, "-t", "nat", "-F", "KUBE-SERVICES")
    wait_for(lambda: "10.96.0.20/32" in node.output(save, "-t", "nat"), what="it is repaired")
    cluster.store.put(endpoint_slice("echo", [POD, "10.244.1.9"]))
    wait_for(lambda: "--to-destination 10.244.1.9:8080" in node.output(save, "-t", "nat"), what="a change is served")
    other = "nft" if name == "legacy" else "legacy"
    assert "KUBE-SERVICES" not in node.output(f"iptables-{other}-save")


def test_the_agent_reaches_no_socket_of_root(member):
    _name, node, _cluster, _variables = member
    assert json.loads(node.output("python3", "-c", ASK, *SOCKETS)) == dict.fromkeys(SOCKETS, "you are root")
    found = as_the_agent(node, ASK, *SOCKETS)
    assert set(found.values()) <= {"PermissionError", "FileNotFoundError"}, found
    # Even for root in the agent's mount namespace: the unit's user does not matter.
    pid = start_of(node)["MainPID"]
    inside = json.loads(
        node.output("nsenter", "-t", pid, "-m", "setpriv", "--bounding-set=-all", "python3", "-c", ASK, *SOCKETS)
    )
    assert {path for path, answer in inside.items() if answer == "you are root"} == {OTHER, "/run/other.sock"}


def test_the_agent_holds_no_mount_of_a_container(member):
    """Containers have their root file systems below hidden directories: earlier containers and later ones."""
    _name, node, _cluster, _variables = member
    places = [f"/run/containerd/rootfs-{when}" for when in ("before", "after")]

    def mounted(place: str) -> bool:
        return f" {place} " in node.output("cat", f"/proc/{start_of(node)['MainPID']}/mountinfo")

    for place in places:
        node.run("mkdir", "-p", place)
        node.run("mount", "-t", "tmpfs", "container", place)
        if place == places[0]:
            node.run("systemctl", "restart", UNIT)
            wait_for_activity(node)
            assert not mounted(place)
    for place in places:
        node.run("umount", place)
        wait_for(lambda place=place: not mounted(place), what=f"{place} is released")


def test_the_agent_replaces_nothing_of_root(member):
    _name, node, _cluster, _variables = member
    code = """
import json, os, sys
found = {}
for path in sys.argv[1:]:
    try:
        os.rename(path, path + ".away")
        found[path] = "replaced"
    except OSError as error:
        found[path] = type(error).__name__
print(json.dumps(found))
"""
    node.run("touch", "/var/lib/kubenode-proxy/snapshot.json.gz")
    files = ["/run/kubenode-proxy/lock", "/run/kubenode-proxy/ledger.json", "/run/kubenode-proxy/agent"]
    files += [
        "/var/lib/kubenode-proxy/snapshot.json.gz",
        "/var/lib/kubenode-proxy/agent",
        "/etc/kubenode-proxy/config.yaml",
    ]
    found = as_the_agent(node, code, *files)
    assert "replaced" not in found.values(), found
    owners = node.output("stat", "-c", "%U %a", *files[:3]).split("\n")[:3]
    assert owners == ["root 660", "root 660", "kubenode-proxy 755"]
