# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Chains on a real kernel, in both iptables variants and both families."""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import subprocess
from pathlib import Path
from typing import Any, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.programs import find_program
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import ChainsResource, parse_save
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.lock import XtablesLock
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.restore import restore, save
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import (
    VARIANTS,
    XtablesVariant,
    detect_variant,
    unsupported_reason,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.fixed import ownership
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import (
    ChainKey,
    ChainTable,
    JumpKey,
    whole_text,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference
from tests.campaigns import examples
from tests.unit.rendering.iptables.routes import by_key, endpoint, route

ADDRESS = {
    "IPv4": ("10.180.0.{}", "172.30.0.{}", "10.0.0.0/8", "192.0.2.1", "198.51.100.1", "203.0.113.0/24", "192.168.0.2"),
    "IPv6": ("fd00:10::{}", "fd00:30::{}", "fd00:10::/64", "fd00:ee::1", "fd00:bb::1", "fd00:aa::/64", "fd00:aa::2"),
}


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a lock file of the test's own; other programs would wait for the host's."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))


@pytest.fixture(params=[(family, name) for family in FAMILIES for name in VARIANTS], ids="-".join)
def variant(request: pytest.FixtureRequest) -> XtablesVariant:
    family, name = request.param
    return detect_variant(family, name)


def facts(family: str, **fields: Any) -> DataplaneSettings:
    pods = LocalTraffic("cidr", ADDRESS[family][2])
    return DataplaneSettings(family=family, node_ip=ADDRESS[family][6], local_traffic=pods, **fields)


def every_kind(family: str) -> Any:
    """Return service ports that together need every kind of rule."""
    pod, cluster_ip, _, external, vip, source, _ = ADDRESS[family]
    ends = [endpoint(pod.format(number), 8080, local=number == 1) for number in (1, 2, 3)]
    everything = {"node_port": 30080, "external_ips": (external,), "load_balancer_ips": (vip,)}
    return by_key(
        route("plain", ends, cluster_ip=cluster_ip.format(1)),
        route("dns", ends, cluster_ip=cluster_ip.format(2), protocol="UDP", port_name="", port=53),
        route("sctp", ends, cluster_ip=cluster_ip.format(3), protocol="SCTP", node_port=30132),
        route("empty", cluster_ip=cluster_ip.format(4), node_port=30081, external_ips=(external,), port=81),
        route("sticky", ends, cluster_ip=cluster_ip.format(5), affinity_seconds=10800),
        route("local", ends[1:], cluster_ip=cluster_ip.format(6), external_local=True, port=82, **everything),
        route("guarded", ends, cluster_ip=cluster_ip.format(7), source_ranges=(source,), port=83, **everything),
        route("inner", ends[1:], cluster_ip=cluster_ip.format(8), internal_local=True, health_check_node_port=31000),
    )


def table_of(variant: XtablesVariant, routes: Any = None, **fields: Any) -> ChainTable:
    chosen = every_kind(variant.family) if routes is None else routes
    return RENDERING.desired_tables(chosen, facts(variant.family, **fields))["chains"]


def resource(variant: XtablesVariant, **options: Any) -> ChainsResource:
    return ChainsResource(variant, ownership(facts(variant.family)), **options)


def converge(chains: ChainsResource, desired: ChainTable) -> int:
    """Apply the chains, check the result, and return the number of changes."""
    change = difference(chains.observe(), desired)
    chains.apply(change)
    assert not difference(chains.observe(), desired)
    return len(change)


def iptables(variant: XtablesVariant, *arguments: str) -> None:
    subprocess.run([variant.main, "-w", "5", *arguments], check=True)


def saved_lines(variant: XtablesVariant) -> list[str]:
    return [line for line in save(variant).splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("fields", [{}, {"local_traffic": LocalTraffic("bridge", "cni0")}], ids=["cidr", "bridge"])
def test_second_run_finds_no_difference(variant: XtablesVariant, fields: Any) -> None:
    desired = RENDERING.desired_tables(every_kind(variant.family), facts(variant.family)._replace(**fields))["chains"]
    assert converge(resource(variant), desired) == len(desired)
    assert converge(resource(variant), desired) == 0


def test_changed_settings_are_detected_and_converge(variant: XtablesVariant) -> None:
    chains = resource(variant)
    converge(chains, table_of(variant))
    for fields in (
        {"masquerade_mark": 0x8000},
        {"random_fully": False},
        {"conntrack_liberal": True},
        {"masquerade_all": True},
        {"large_cluster_endpoints": 3},
        {"node_port_cidrs": (ADDRESS[variant.family][5],), "node_port_addresses": (ADDRESS[variant.family][6],)},
    ):
        assert converge(chains, table_of(variant, **fields)) > 0


def test_jumps_are_at_the_head_in_order(variant: XtablesVariant) -> None:
    iptables(variant, "-A", "FORWARD", "-j", "DROP")
    converge(resource(variant), table_of(variant))
    rules = parse_save(save(variant)).chains[("filter", "FORWARD")]
    assert [rule.split()[-1] for rule in rules] == [
        "KUBE-PROXY-FIREWALL",
        "KUBE-FORWARD",
        "KUBE-SERVICES",
        "KUBE-EXTERNAL-SERVICES",
        "DROP",
    ]


EXTERNAL_RULES = [
    "-t nat -N MINE",
    "-t nat -A MINE -p tcp -m tcp --dport 7 -j RETURN",
    "-t nat -A PREROUTING -j MINE",
    '-t nat -A PREROUTING -m comment --comment "\'quoted\' \\" text" -j MINE',
    "-t nat -N KUBE-MARK-DROP",
    "-t nat -A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000",
    "-N MINE-FILTER",
    "-A MINE-FILTER -m limit --limit 3/min -j LOG",
    "-A FORWARD -j MINE-FILTER",
    "-P FORWARD DROP",
    "-t mangle -N KUBE-KUBELET-CANARY",
    "-t mangle -N KUBE-IPTABLES-HINT",
]


def add_external_rules(variant: XtablesVariant) -> list[str]:
    for line in EXTERNAL_RULES:
        iptables(variant, *shlex.split(line))
    return saved_lines(variant)


def external_lines(variant: XtablesVariant) -> list[str]:
    """Return the lines of iptables-save that are not ours, without accepting built-in chains (part of the table)."""
    kept = ("KUBE-MARK-DROP", "KUBE-KUBELET-CANARY", "KUBE-IPTABLES-HINT")
    lines = [line for line in saved_lines(variant) if "KUBE-" not in line or any(name in line for name in kept)]
    return [line for line in lines if line.startswith(("-", ":")) and not line.endswith(" ACCEPT [0:0]")]


def test_external_rules_survive_byte_for_byte(variant: XtablesVariant) -> None:
    add_external_rules(variant)
    before = external_lines(variant)
    assert len(before) == len(EXTERNAL_RULES)
    chains = resource(variant)
    for routes in (every_kind(variant.family), {}, every_kind(variant.family)):
        converge(chains, table_of(variant, routes))
        assert external_lines(variant) == before
    converge(resource(variant, for_removal=True), {})
    assert external_lines(variant) == before


def test_clean_up_leaves_nothing_of_ours(variant: XtablesVariant) -> None:
    chains = resource(variant)
    converge(chains, table_of(variant))
    removal = resource(variant, for_removal=True)
    assert converge(removal, {}) > 0
    assert removal.kept == []
    assert not any("KUBE-" in line for line in saved_lines(variant))
    assert not any(line.startswith("-A") for line in saved_lines(variant))


def test_clean_up_beside_kubelet_keeps_the_shared_chain(variant: XtablesVariant) -> None:
    before = add_external_rules(variant)
    converge(resource(variant), table_of(variant))
    removal = resource(variant, for_removal=True)
    converge(removal, {})
    assert removal.kept == ["filter KUBE-FIREWALL"]
    remaining = [line for line in saved_lines(variant) if "KUBE-FIREWALL" not in line]
    assert {line for line in before if line.startswith("-")} == {line for line in remaining if line.startswith("-")}
    firewall = [line for line in saved_lines(variant) if "KUBE-FIREWALL" in line]
    assert {":KUBE-FIREWALL - [0:0]", "-A INPUT -j KUBE-FIREWALL", "-A OUTPUT -j KUBE-FIREWALL"} <= set(firewall)


def test_clean_up_keeps_chains_that_external_rules_jump_to(variant: XtablesVariant) -> None:
    converge(resource(variant), table_of(variant))
    iptables(variant, "-t", "nat", "-N", "PORTMAP")
    iptables(variant, "-t", "nat", "-A", "PORTMAP", "-j", "KUBE-MARK-MASQ")
    removal = resource(variant, for_removal=True)
    converge(removal, {})
    assert removal.kept == ["nat KUBE-MARK-MASQ"]
    assert "-A PORTMAP -j KUBE-MARK-MASQ" in saved_lines(variant)


@pytest.mark.parametrize("observed", [True, False], ids=["observed", "partial"])
@pytest.mark.parametrize("table", ["nat", "filter"])
def test_a_chain_that_external_rules_jump_to_is_emptied_by_a_sync(
    variant: XtablesVariant, table: str, observed: bool
) -> None:
    before, after = table_of(variant), table_of(variant, {})
    chain = next(key for key in before if key not in after and isinstance(key, ChainKey))
    if table == "filter":
        # Chains of this table are the same with all Services, but not in all modes.
        chain = ChainKey("filter", "KUBE-PROXY-FIREWALL")
        after = {key: value for key, value in after.items() if chain.chain not in " ".join(key)}
    chains = resource(variant)
    converge(chains, before)
    iptables(variant, "-t", table, "-N", "PORTMAP")
    iptables(variant, "-t", table, "-A", "PORTMAP", "-j", chain.chain)
    change = difference(chains.observe() if observed else before, after)
    chains.apply(change)
    assert difference(chains.observe(), after) == Change(removed={chain: ()})
    # Later changes neither remove it nor fail, until the last reference has gone.
    for desired in (before, after):
        chains.apply(difference({**(after if desired is before else before), chain: ()}, desired))
    assert difference(chains.observe(), after) == Change(removed={chain: ()})
    iptables(variant, "-t", table, "-F", "PORTMAP")
    assert converge(chains, after) == 1


def test_leftovers_are_repaired(variant: XtablesVariant) -> None:
    chains, desired = resource(variant), table_of(variant)
    converge(chains, desired)
    iptables(variant, "-t", "nat", "-N", "KUBE-SEP-LEFTOVERLEFTOVER")
    iptables(variant, "-t", "nat", "-A", "KUBE-SERVICES", "-j", "KUBE-SEP-LEFTOVERLEFTOVER")
    iptables(variant, "-t", "nat", "-I", "OUTPUT", "-m", "comment", "--comment", "old portals", "-j", "KUBE-SERVICES")
    for _ in range(2):
        iptables(variant, "-I", "INPUT", "-j", "KUBE-FIREWALL")
    iptables(variant, "-F", "KUBE-FORWARD")
    iptables(variant, "-t", "mangle", "-X", "KUBE-PROXY-CANARY")
    change = difference(chains.observe(), desired)
    assert ChainKey("mangle", "KUBE-PROXY-CANARY") in change.added
    assert ChainKey("filter", "KUBE-FORWARD") in change.replaced
    assert change.replaced[JumpKey("filter", "INPUT", "-j KUBE-FIREWALL")] == (3, 1)
    assert len(change.removed) == 2
    converge(chains, desired)


def test_table_with_rules_that_only_nft_understands_is_an_error() -> None:
    """Reading such a table fails; it is not treated as one without our chains when all of ours are to be removed."""
    variant = detect_variant("IPv4", "nft")
    iptables(variant, "-t", "nat", "-A", "PREROUTING", "-j", "ACCEPT")
    rule = "add rule ip nat PREROUTING dnat to numgen random mod 2 map { 0 : 192.0.2.1, 1 : 192.0.2.2 }"
    subprocess.run(["nft", rule], check=True)
    assert resource(variant, for_removal=True).observe() == {}
    with pytest.raises(KernelError, match=r"table nat of IPv4: .* only nft understands"):
        resource(variant).observe()
    iptables(variant, "-t", "nat", "-N", "KUBE-SERVICES")
    with pytest.raises(KernelError, match=r"table nat of IPv4: .* only nft understands"):
        resource(variant, for_removal=True).observe()


def test_counters_of_unchanged_chains_are_kept(variant: XtablesVariant) -> None:
    def counted() -> list[str]:
        text = subprocess.run([variant.save, "-c"], capture_output=True, text=True, check=True).stdout
        unchanged = (" -A KUBE-POSTROUTING -m mark", " -A OUTPUT -j KUBE-FIREWALL")
        return [line for line in text.splitlines() if any(part in line for part in unchanged)]

    chains = resource(variant)
    converge(chains, table_of(variant))
    with socket.socket(socket.AF_INET6 if variant.family == IPV6 else socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"any", ("::1" if variant.family == IPV6 else "127.0.0.1", 9))
    before = counted()
    assert len(before) == 2
    assert not any(line.startswith("[0:0]") for line in before)
    converge(chains, table_of(variant, {}))
    assert counted() == before


def test_long_chain_is_edited_in_place(variant: XtablesVariant) -> None:
    pod, cluster_ip = ADDRESS[variant.family][:2]
    routes = [
        route(
            f"s{number:03}",
            [endpoint(pod.format(number))],
            cluster_ip=cluster_ip.format(number),
            node_port=30000 + number,
        )
        for number in range(1, 120)
    ]
    chains = resource(variant)
    converge(chains, table_of(variant, by_key(*routes)))
    for fewer in (routes[:60] + routes[61:], routes, routes[1:], routes[:-1], routes[3:50] + routes[52:]):
        desired = table_of(variant, by_key(*fewer))
        change = difference(chains.observe(), desired)
        assert ChainKey("nat", "KUBE-SERVICES") in change.replaced
        converge(chains, desired)


NUMBERS = st.lists(st.integers(1, 6), max_size=3, unique=True)
SHAPES = st.fixed_dictionaries(
    {
        "affinity_seconds": st.sampled_from((0, 600)),
        "node_port": st.sampled_from((0, 30001)),
        "external_local": st.booleans(),
        "internal_local": st.booleans(),
        "protocol": st.sampled_from(("TCP", "UDP", "SCTP")),
        "load_balancer": st.booleans(),
        "guarded": st.booleans(),
    }
)
STATES = st.lists(st.tuples(st.integers(1, 4), NUMBERS, SHAPES), max_size=4, unique_by=lambda item: item[0])


def routes_of(family: str, state: Any) -> Any:
    pod, cluster_ip, _, _, vip, source, _ = ADDRESS[family]
    routes = []
    for number, ends, shape in state:
        fields = dict(shape)
        balancer, guarded = fields.pop("load_balancer"), fields.pop("guarded")
        fields["load_balancer_ips"] = (vip,) if balancer else ()
        fields["source_ranges"] = (source,) if guarded else None
        known = [endpoint(pod.format(end), local=end % 2 == 0) for end in ends]
        routes.append(route(f"s{number}", known, cluster_ip=cluster_ip.format(number), port=number, **fields))
    return by_key(*routes)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=STATES, second=STATES)
def test_a_then_b_then_a_leaves_exactly_a(variant: XtablesVariant, first: Any, second: Any) -> None:
    chains = resource(variant)
    converge(resource(variant, for_removal=True), {})
    a, b = (table_of(variant, routes_of(variant.family, state)) for state in (first, second))
    converge(chains, a)
    text = saved_lines(variant)
    converge(chains, b)
    converge(chains, a)
    assert chains.observe() == a
    assert sorted(saved_lines(variant)) == sorted(text)


@pytest.fixture
def held_lock() -> Iterator[None]:
    descriptor = os.open(os.environ["XTABLES_LOCKFILE"], os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


@pytest.mark.usefixtures("held_lock")
@pytest.mark.parametrize("family", FAMILIES)
def test_held_lock_names_its_holder(family: str) -> None:
    legacy = detect_variant(family, "legacy")
    chains = resource(legacy)
    with pytest.raises(KernelError) as caught:
        chains.apply(difference(chains.observe(), table_of(legacy)))
    assert f"process {os.getpid()} (" in str(caught.value)
    assert "5 seconds" in str(caught.value)
    assert chains.observe() == {}


@pytest.mark.usefixtures("held_lock")
def test_held_lock_with_a_restore_program_that_takes_no_lock() -> None:
    old = detect_variant("IPv4", "legacy")._replace(version=(1, 6, 0))
    with pytest.raises(KernelError, match=f"process {os.getpid()} "):
        restore(old, whole_text(table_of(old)), wait=0.3)


def test_own_lock_is_released() -> None:
    for _ in range(2):
        with XtablesLock(0.1):
            pass
    old = detect_variant("IPv4", "legacy")
    with XtablesLock(1), pytest.raises(KernelError, match="xtables lock"):
        restore(old, "*nat\nCOMMIT\n", wait=1)


def test_failure_quotes_the_line_and_changes_nothing(variant: XtablesVariant) -> None:
    converge(resource(variant), table_of(variant))
    before = saved_lines(variant)
    text = "*nat\n:KUBE-SERVICES - [0:0]\n-A KUBE-SERVICES -m bogus -j DROP\nCOMMIT\n"
    with pytest.raises(
        KernelError, match=r"there is no match extension bogus \(line 3: -A KUBE-SERVICES -m bogus -j DROP\)"
    ):
        restore(variant, text)
    with pytest.raises(KernelError, match="the kernel lacks the extension ipvs"):
        restore(variant, f"*filter\n-A KUBE-FORWARD -m ipvs --vaddr {ADDRESS[variant.family][3]} -j DROP\nCOMMIT\n")
    assert saved_lines(variant) == before


def test_hostile_comments_in_external_rules_change_nothing(variant: XtablesVariant) -> None:
    chains = resource(variant)
    converge(chains, table_of(variant))
    iptables(variant, "-t", "nat", "-N", "MINE")
    hostile = "a\n-A OUTPUT -j KUBE-SERVICES\n:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]\nCOMMIT\n*filter"
    iptables(variant, "-t", "nat", "-A", "MINE", "-m", "comment", "--comment", hostile, "-j", "RETURN")
    assert converge(chains, table_of(variant)) == 0


def test_observing_creates_no_table(variant: XtablesVariant) -> None:
    assert resource(variant).observe() == {}
    assert saved_lines(variant) == []


def test_variant_is_detected_from_existing_rules() -> None:
    assert "plain iptables command" in detect_variant("IPv4").reason
    for name in VARIANTS:
        iptables(detect_variant("IPv4", name), "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
        for family in FAMILIES:
            found = detect_variant(family)
            assert (found.name, "KUBE-IPTABLES-HINT" in found.reason) == (name, True)
        iptables(detect_variant("IPv4", name), "-t", "mangle", "-X", "KUBE-IPTABLES-HINT")
    iptables(detect_variant("IPv6", "legacy"), "-A", "INPUT", "-j", "ACCEPT")
    assert detect_variant("IPv4").name == "legacy"


def test_variant_is_detected_with_only_plain_program_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in ("", "-save", "-restore"):
        (tmp_path / f"iptables{suffix}").symlink_to(find_program(f"iptables-legacy{suffix}"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = detect_variant("IPv4", "legacy")
    assert found.main == str(tmp_path / "iptables")
    converge(resource(found), table_of(found))


def test_family_support(variant: XtablesVariant) -> None:
    assert unsupported_reason(variant.family, variant) == ""
    assert "not installed" in unsupported_reason(variant.family, None)
    if variant.family == IPV6:
        with open("/proc/sys/net/ipv6/conf/all/disable_ipv6", "w", encoding="ascii") as file:
            file.write("1")
        assert "disable_ipv6" in unsupported_reason(variant.family, variant)
