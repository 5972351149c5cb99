# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables that another program has made dormant, so that the kernel calls none of their chains, are drift."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.protocol import (
    NETLINK_NETFILTER,
    NLM_F_CREATE,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.socket import NetlinkSocket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.ipvs_table import IpvsTableResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.messages import (
    BATCH_BEGIN,
    BATCH_END,
    Encoder,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.policy_table import PolicyTableResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import ChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import detect_variant
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.fixed import ownership
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import (
    TABLE_DORMANT,
    TABLE_OWNER,
    TABLE_PERSIST,
    BaseHook,
    ChainValue,
    ObjectKey,
    TableValue,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.text import table_family
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.kernel.agent_node import AgentNode, endpoint_slice, service
from tests.kernel.policy_node import pod
from tests.waiting import wait_for

OURS = {
    "ip kube-proxy": lambda: NftablesResource("IPv4"),
    "ip6 kube-proxy": lambda: NftablesResource("IPv6"),
    "ip kubenode-ipvs": lambda: IpvsTableResource("IPv4"),
    "ip6 kubenode-ipvs": lambda: IpvsTableResource("IPv6"),
    "inet kubenode-network-policy": PolicyTableResource,
}
XTABLES = ("nat", "filter", "mangle")


def run_nft(*words: str) -> str:
    return subprocess.run(["nft", *words], stdout=subprocess.PIPE, text=True, check=True).stdout


def make_dormant(table: str) -> None:
    run_nft("add", "table", *table.split(), "{ flags dormant; }")


def dormant() -> list[str]:
    """Return the tables that are dormant."""
    lines = run_nft("list", "ruleset").splitlines()
    return [line[6:-2] for line, following in zip(lines, lines[1:]) if following == "\tflags dormant"]


def content(resource: NftablesResource, hook: str) -> dict[Any, Any]:
    """Return a table with one hook."""
    base = BaseHook("filter", hook, 7)
    return {resource.table.key: TableValue(), ObjectKey("chain", f"on-{hook}"): ChainValue((), base)}


@pytest.mark.parametrize("table", OURS)
def test_a_table_of_ours_is_made_active_together_with_other_changes(table: str) -> None:
    with OURS[table]() as resource:
        resource.apply(difference({}, content(resource, "input")))
        make_dormant(table)
        assert dormant() == [table]
        observed = resource.observe()
        assert observed[resource.table.key] == TableValue(TABLE_DORMANT)
        assert resource.describe(resource.table.key, observed[resource.table.key]) == [
            f"table {table} {{ flags dormant; }}"
        ]
        change = difference(observed, content(resource, "output"))
        assert list(change.replaced) == [resource.table.key] and len(change) == 3
        resource.apply(change)
        assert not dormant()
        assert resource.observe() == content(resource, "output")


def test_another_programs_table_of_our_name_is_named_with_its_owner() -> None:
    encoder = Encoder("IPv4")
    with NetlinkSocket(NETLINK_NETFILTER) as other, NftablesResource("IPv4") as resource:
        kind, _flags, payload = encoder.table_flags(TABLE_OWNER | TABLE_PERSIST)
        assert not other.transact([BATCH_BEGIN, (kind, NLM_F_CREATE, payload), BATCH_END], single_send=True).errors
        change = difference(resource.observe(), content(resource, "input"))
        assert resource.table.key in change.replaced
        with pytest.raises(KernelError, match=f"netlink port {other.port} .* owns the table"):
            resource.apply(change)
    with NftablesResource("IPv4") as resource:
        # Its owner has ended. The flag that has kept the table cannot be removed, and does no harm.
        asleep = encoder.table_flags(TABLE_DORMANT | TABLE_PERSIST)
        assert not resource.socket.transact([BATCH_BEGIN, asleep, BATCH_END], single_send=True).errors
        assert resource.observe() == {resource.table.key: TableValue(TABLE_DORMANT | TABLE_PERSIST)}
        resource.apply(difference(resource.observe(), content(resource, "input")))
        assert resource.observe() == content(resource, "input")


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_of_iptables_nft_are_made_active(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    pods = LocalTraffic("cidr", "10.0.0.0/8" if family == "IPv4" else "fd00::/64")
    settings = DataplaneSettings(family=family, node_ip="", local_traffic=pods)
    desired = RENDERING.desired_tables({}, settings)["chains"]
    chains = ChainsResource(detect_variant(family, "nft"), ownership(settings))
    chains.apply(difference(chains.observe(), desired))
    tables = [f"{table_family(family)} {table}" for table in XTABLES]
    for table in tables:
        make_dormant(table)
    make_dormant(f"{table_family(family)} raw")
    change = difference(chains.observe(), desired)
    shown = [line for key, value in change.removed.items() for line in chains.describe(key, value)]
    assert shown == [f"{table}: flags dormant" for table in sorted(XTABLES)] and len(change) == len(shown)
    chains.apply(change)
    assert dormant() == [f"{table_family(family)} raw"]
    assert not difference(chains.observe(), desired)


@pytest.fixture(params=["nftables", "iptables"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AgentNode]:
    agent_node = AgentNode(tmp_path, request.param, "nft" if request.param == "iptables" else "")
    agent_node.node_configuration["networkPolicy"] = {"enabled": request.param == "nftables"}
    agent_node.write_configuration()
    agent_node.store.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}})
    agent_node.store.put(pod("web", "10.244.1.5", {}))
    agent_node.store.put(service(1))
    agent_node.store.put(endpoint_slice(1))
    yield agent_node
    agent_node.close()


def served_tables(node: AgentNode) -> list[str]:
    if node.mode == "iptables":
        return [f"{family} {table}" for family in ("ip", "ip6") for table in XTABLES]
    return ["ip kube-proxy", "ip6 kube-proxy", "inet kubenode-network-policy"]


def test_the_agent_and_a_convergence_make_each_table_active(node: AgentNode) -> None:
    node.start()
    tables = served_tables(node)
    for table in tables:
        wait_for(lambda name=table: f"table {name}\n" in run_nft("list", "tables"), 30)
        make_dormant(table)
        wait_for(lambda: not dormant(), 30)
    wait_for(lambda: node.status()["driftRepaired"], 30)
    assert node.log.count("sync failed") == 0
    node.stop()

    for table in tables:
        make_dormant(table)
    shown = node.converge("--check", "--diff")
    assert shown.stdout.count("flags dormant") == len(tables), shown.stdout + shown.stderr
    assert sorted(dormant()) == sorted(tables)
    assert node.converge().returncode == 0
    assert not dormant()
