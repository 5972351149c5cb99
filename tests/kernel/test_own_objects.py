# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever was programmed is removed, and nothing else: random Services beside objects of others that look similar.

The usual tools print the same before and after, on every way out: clean-up, another mode, and a rollback.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.model import DEVICE
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback import restore
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.kernel.agent_node import AgentNode
from tests.kernel.convergence_node import UML, has_ipvs, remove
from tests.kernel.external_rules import has_nftables
from tests.kernel.test_leaving import dumps, separate_lock
from tests.lab import manifests
from tests.lab.system import ip_batch, run
from tests.waiting import wait_for

__all__ = ["separate_lock"]

#: Addresses of the node itself, one of them as keepalived or kube-vip adds it, and addresses that only Services have.
NODE, VIRTUAL, EXTERNAL = "192.0.2.11", "203.0.113.78", ("198.51.100.7", "198.51.100.8")
NODE_V6, VIRTUAL_V6 = "2001:db8::11", "2001:db8::78"
FREE = "192.0.2.200"
HOST = (ClusterState(), load({}).configuration)


class External(NamedTuple):
    """Objects of another program: the commands that add and remove them."""

    add: tuple[str, ...]
    remove: tuple[str, ...]
    #: The address of a virtual server, which the configuration must exclude.
    server: str = ""


def virtual_server(address: str, port: int) -> External:
    """Return a virtual server as keepalived makes it."""
    place = f"-t {f'[{address}]' if ':' in address else address}:{port}"
    real = "[2001:db8:9::9]:6443" if ":" in address else "192.0.2.9:6443"
    return External(
        (f"ipvsadm -A {place} -s wlc", f"ipvsadm -a {place} -r {real} -m -w 7"), (f"ipvsadm -D {place}",), address
    )


def ipset(name: str, kind: str, element: str) -> External:
    """Return a set with one element."""
    return External((f"ipset create {name} {kind}", f"ipset add {name} {element}"), (f"ipset destroy {name}",))


def chain(program: str, table: str, name: str, hook: str) -> External:
    """Return a chain with a rule, and the jump to it."""
    words = f"{program} -t {table}"
    return External(
        (f"{words} -N {name}", f"{words} -A {name} -p tcp --dport 9 -j RETURN", f"{words} -A {hook} -j {name}"),
        (f"{words} -D {hook} -j {name}", f"{words} -F {name}", f"{words} -X {name}"),
    )


def table(family: str, name: str) -> External:
    """Return a table of nf_tables with a chain and a set that are named like ours."""
    return External(
        (
            f"nft add table {family} {name}",
            f"nft add set {family} {name} cluster-ips {{ type inet_service; }}",
            f"nft add element {family} {name} cluster-ips {{ 80 }}",
            f"nft add chain {family} {name} services {{ type filter hook input priority 5; }}",
        ),
        (f"nft delete table {family} {name}",),
    )


def address(text: str, device: str = "eth0") -> External:
    """Return an address of the node that a program adds."""
    length, more = (128, " nodad") if ":" in text else (32, "")
    return External(
        (f"ip addr add {text}/{length} dev {device}{more}",), (f"ip addr del {text}/{length} dev {device}",)
    )


def device(name: str, number: int) -> External:
    """Return a device; its hardware address would be random."""
    return External((f"ip link add {name} address 02:00:00:00:00:0{number} type bridge",), (f"ip link del {name}",))


def external_objects(modes: Sequence[str]) -> list[External]:
    """Return objects of other programs that resemble those of the modes."""
    legacy = "legacy" if not has_nftables() else "nft"
    found = [
        chain(f"iptables-{legacy}", "nat", "KUBE-SERVICES2", "PREROUTING"),
        chain(f"iptables-{legacy}", "filter", "KUBE-FORWARDING", "FORWARD"),
        chain(f"ip6tables-{legacy}", "nat", "KUBE-HOSTPORTS", "OUTPUT"),
        device("kube-ipvs1", 1),
        device("kube-bridge", 2),
        address(EXTERNAL[1]),
        address(FREE),
        address("10.96.0.200", "lo"),
    ]
    if has_nftables():
        found += [table("ip", "kube-proxy2"), table("inet", "kube-proxy"), table("ip6", "kubenode-ipvs-old")]
    if any(mode.startswith("ipvs") for mode in modes):
        places = [(NODE, 8443), (VIRTUAL, 6443), ("10.96.0.1", 8443), (EXTERNAL[0], 9081), (NODE_V6, 8443), (FREE, 443)]
        found += [
            *(virtual_server(*place) for place in places),
            virtual_server("fd00:96::1", 8443),
            External(("ipvsadm -A -f 7 -s rr",), ("ipvsadm -D -f 7",)),
            ipset("KUBE-CLUSTER-IP2", "hash:ip,port", "10.96.0.1,tcp:80"),
            ipset("KUBE-NODE-PORT", "bitmap:port range 0-65535", "30001"),
            ipset("KUBE-6-NODEPORT", "hash:ip family inet6", NODE_V6),
        ]
    return found


def services(dice: random.Random, everything: bool) -> list[dict[str, Any]]:
    """Return random Services whose external addresses are partly the node's own; ``everything`` False: half of them."""
    objects: list[dict[str, Any]] = [
        {
            "kind": "Node",
            "metadata": {"name": "node-1"},
            "status": {"addresses": [{"type": "InternalIP", "address": item} for item in (NODE, NODE_V6)]},
        }
    ]
    for number in range(1, 7):
        protocol = dice.choice(["TCP", "TCP", "UDP"])
        port = {**manifests.port(80 + number, name="main", protocol=protocol), "nodePort": 30000 + number}
        spec: dict[str, Any] = {"type": dice.choice(["NodePort", "LoadBalancer"]), "externalIPs": []}
        pool = [NODE, VIRTUAL, NODE_V6, VIRTUAL_V6, *EXTERNAL]
        spec["externalIPs"] = dice.sample(pool, dice.randrange(len(pool)))
        if dice.random() < 0.3:
            spec["externalTrafficPolicy"] = "Local"
        name = f"service-{number}"
        made = manifests.service(name, (f"10.96.0.{number}", f"fd00:96::{number}"), [port], **spec)
        if spec["type"] == "LoadBalancer":
            ingress = [{"ip": item} for item in dice.sample(pool, 2) if item not in spec["externalIPs"]]
            made["status"] = {"loadBalancer": {"ingress": ingress}}
        slices = [
            manifests.endpoint_slice(
                name,
                [manifests.endpoint(f"{prefix}{last}", "node-1") for last in range(1, dice.randrange(2, 4))],
                [manifests.port(8080, name="main", protocol=protocol)],
                name=f"{name}-{family}",
            )
            for family, prefix in (("ipv4", f"10.244.{number}."), ("ipv6", f"fd00:244:{number}::"))
        ]
        if everything or number % 2:
            objects += [made, *slices]
    return objects


def sorted_dumps() -> dict[str, list[str]]:
    """Return what the usual tools print, each in an order that does not depend on when an object was made."""
    return {command: sorted(lines) for command, lines in dumps().items()}


def give_addresses() -> None:
    """Make an interface with the node's own addresses."""
    ip_batch(
        [
            "link add eth0 type veth peer name up0",
            "link set eth0 up addrgenmode none",
            "link set up0 up addrgenmode none",
            *(f"address add {item}/24 dev eth0" for item in (NODE, VIRTUAL)),
            *(f"address add {item}/64 dev eth0 nodad" for item in (NODE_V6, VIRTUAL_V6)),
        ]
    )


def execute(commands: Sequence[str]) -> None:
    for command in commands:
        run(command.split())


@pytest.mark.parametrize(
    "seed", (1, 2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full))
)
@pytest.mark.parametrize(
    "modes",
    (
        pytest.param(("iptables", "nftables"), id="host"),
        pytest.param(("ipvs iptables", "iptables"), marks=UML, id="uml"),
        pytest.param(("ipvs iptables", "ipvs nftables", "iptables", "nftables"), marks=pytest.mark.ipvs, id="qemu"),
    ),
)
def test_what_was_there_is_there_and_nothing_of_ours_is_left(tmp_path: Path, modes: tuple[str, ...], seed: int) -> None:
    dice = random.Random(seed)
    give_addresses()
    objects = dice.sample(external_objects(modes), k=len(external_objects(modes)))
    later = objects[: len(objects) // 2]
    excluded = [f"{item.server}/{128 if ':' in item.server else 32}" for item in objects if item.server]
    for item in objects:
        execute(item.add)
    expected = sorted_dumps()
    for item in later:
        execute(item.remove)

    def program(mode: str, everything: bool) -> Any:
        name, _, filter_backend = mode.partition(" ")
        document = {"mode": name, "ipvs": {"excludeCIDRs": excluded}, "nodePortAddresses": ["0.0.0.0/0", "::/0"]}
        configuration = load(document, node_source={"ipvsFilterBackend": filter_backend or "auto"}).configuration
        request = Request(
            cluster=ClusterState.from_objects(services(random.Random(seed), everything)),
            configuration=configuration,
            node_name="node-1",
            state_directory=str(tmp_path / "state"),
            history_directory=str(tmp_path / "history"),
            whole_cluster=False,
            max_unserved_percent=100.0,
        )
        return converge(request)

    program(modes[0], True)
    if has_ipvs():
        # A run was killed while it resized a set.
        execute(["ipset create KUBENODE-SWAP hash:ip"])
    for item in later:
        execute(item.add)
    for mode in dice.sample(modes, k=len(modes)):
        program(mode, True)
        program(mode, False)
        assert not program(mode, False).changed
        servers = {line for line in sorted_dumps().get("ipvsadm", []) if line not in expected.get("ipvsadm", [])}
        # Those of Services that are gone, too, although the ranges of others include their addresses.
        assert bool(servers) == mode.startswith("ipvs")
        assert not [line for line in servers if any(f":{80 + number} " in line for number in (2, 4, 6))]
    if seed % 2:
        saved = program(modes[0], True).saved_state
        assert saved is not None
        request = restore.RollbackRequest(
            to=saved,
            history_directory=str(tmp_path / "history"),
            state_directory=str(tmp_path / "state"),
            stop_units=False,
        )
        restore.rollback(request)
        # What others have added since then is kept, except in what is restored as a whole.
        left = sorted_dumps()
        for command in ("ipvsadm", "address", "nft"):
            gone = [line for line in expected.get(command, []) if line not in left.get(command, [])]
            assert (command, gone) == (command, [])
    remove(tmp_path)
    remove(tmp_path / "state")
    assert sorted_dumps() == expected


@pytest.mark.parametrize("seed", (1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)))
@pytest.mark.parametrize("ended_by", (signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.full)))
def test_what_the_agent_of_userspace_mode_made_is_removed(tmp_path: Path, seed: int, ended_by: int) -> None:
    """The agent also leaves the mode and takes it again; files of others beside its own are kept."""
    dice = random.Random(seed)
    give_addresses()
    ip_batch(["link set lo up"])
    objects = [*external_objects(("userspace",)), device(f"{DEVICE[:-1]}1", 3), device(DEVICE[:-1], 4)]
    for item in dice.sample(objects, k=len(objects)):
        execute(item.add)
    expected = sorted_dumps()
    node = AgentNode(tmp_path, "userspace")
    beside = [node.scratch / "run" / name for name in ("kubenode-proxy.json", "lock2", ".lock", "ledger.json.old")]
    (node.scratch / "run").mkdir()
    for file in beside:
        file.write_text("of another program")
    try:
        for raw in services(random.Random(seed), True):
            node.store.put(raw)
        node.start()
        for mode in ("nftables", "userspace", "iptables", "userspace")[: dice.randrange(5)]:
            node.write_configuration(mode=mode)
            assert node.run("reload", "--control", str(node.scratch / "agent.sock")).returncode == 0
            wait_for(lambda mode=mode: node.status()["mode"] == mode, 60.0, 0.1)
        assert sorted_dumps() != expected
        assert node.stop(ended_by) in (0, -ended_by)
    finally:
        node.close()
    remove(node.scratch / "run")
    assert sorted_dumps() == expected
    assert [file.read_text() for file in beside] == ["of another program"] * len(beside)
    assert sorted(file.name for file in (node.scratch / "run").iterdir() if file not in beside) in ([], ["lock"])
