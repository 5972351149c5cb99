# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The nftables table in a real kernel: written over netlink, read back, compared with the nft program, repaired."""

from __future__ import annotations

import re
import select
import subprocess
from pathlib import Path
from typing import Any, Iterator, Optional

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence import handles
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.registry import mode_object
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import observation, parts, transactions
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.features import answers
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.generation import read_generation
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.monitor import TableMonitor
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import (
    BaseHook,
    ChainValue,
    ElementKey,
    ObjectKey,
    SetValue,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.text import restore_text, table_family
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference
from tests.unit.rendering.nftables.samples import sample_routes, sample_settings, settings_of_other_rules

FAMILIES = ("IPv4", "IPv6")


def nft(script: str, check: bool = True) -> str:
    done = subprocess.run(["nft", "-f", "-"], input=script, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def listed(family: str) -> str:
    words = ["nft", "-s", "list", "table", table_family(family), "kube-proxy"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def listed_with_counters(family: str) -> str:
    words = ["nft", "list", "table", table_family(family), "kube-proxy"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def normal(text: str) -> dict[str, list[str]]:
    """Return the blocks of ``nft list table``; elements are sorted, since nft prints them in hash order."""
    blocks: dict[str, list[str]] = {}
    text = re.sub(r",\s+", ", ", text)
    for name, body in re.findall(r"^\t((?:set|map|chain) \S+) \{\n(.*?)^\t\}", text, re.MULTILINE | re.DOTALL):
        lines = []
        for line in body.splitlines():
            found = re.match(r"\s*elements = \{ (.*) \}", line)
            lines.append(" ".join(sorted(found[1].split(", "))) if found else line.strip())
        blocks[name] = lines
    return blocks


def sample(family: str) -> dict[str, dict[Any, Any]]:
    return RENDERING.desired_tables(sample_routes(family), sample_settings(family))


def observed_in_parts(resource: NftablesResource, expected: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for part in resource.parts(expected) for key, value in part.observed.items()}


def slab_mib() -> float:
    """Return the kernel's memory that it cannot reclaim, in MiB."""
    found = re.search(r"^SUnreclaim:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 1024


@pytest.fixture(params=FAMILIES)
def resource(request: pytest.FixtureRequest) -> Iterator[NftablesResource]:
    with NftablesResource(request.param) as opened:
        yield opened


def converge(resource: NftablesResource, desired: dict[Any, Any]) -> Change[Any, Any]:
    change = difference(resource.observe(), desired)
    resource.apply(change)
    assert not difference(resource.observe(), desired)
    return change


def test_probe_changes_nothing() -> None:
    for family in FAMILIES:
        assert mode_object("nftables").unsupported_reasons([family]) == []
    assert subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True).stdout == ""


def test_observed_state_equals_desired_state_and_removal_leaves_nothing(resource: NftablesResource) -> None:
    desired = sample(resource.family)["table objects"]
    assert resource.observe() == {}
    assert len(converge(resource, desired)) == len(desired)
    assert not converge(resource, desired)
    nft("table inet other { chain c { type filter hook input priority 0; }; }")
    converge(resource, {})
    assert "kube-proxy" not in subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True).stdout
    assert "table inet other" in subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True).stdout


def test_whether_it_is_empty_is_known_without_reading_its_elements(
    resource: NftablesResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resource.is_empty() and not resource.observe()
    nft("table inet kube-proxy { chain c { type filter hook input priority 0; }; }")
    assert resource.is_empty() and not resource.observe()
    converge(resource, sample(resource.family)["table objects"])
    with monkeypatch.context() as patched:
        patched.setattr(resource, "observe", None)
        assert not resource.is_empty()
    converge(resource, {})
    assert resource.is_empty() and not resource.observe()


def test_nft_lists_the_table_as_if_it_had_loaded_it(resource: NftablesResource) -> None:
    """Our netlink messages and our text result in the same table, and nft accepts the text."""
    desired = sample(resource.family)
    converge(resource, desired["table objects"])
    over_netlink = listed(resource.family)
    nft(restore_text(resource.family, desired))
    assert normal(over_netlink) == normal(listed(resource.family))
    assert len(normal(over_netlink)) == sum(key[0] in ("set", "chain") for key in desired["table objects"])
    # A table loaded by nft equals the desired one when we read it.
    assert not difference(resource.observe(), desired["table objects"])


@pytest.mark.parametrize("changes", settings_of_other_rules())
def test_a_table_that_nft_loaded_is_no_drift(resource: NftablesResource, changes: dict[str, Any]) -> None:
    """The program encodes each rule as this project does, whatever the settings."""
    family = resource.family
    desired = RENDERING.desired_tables(sample_routes(family), sample_settings(family, **changes))
    nft(restore_text(family, desired))
    assert not difference(resource.observe(), desired["table objects"])
    converge(resource, {})
    converge(resource, desired["table objects"])


def test_sets_of_clients_cost_little_memory_and_are_no_drift_without_a_rule(
    resource: NftablesResource,
) -> None:
    """A cluster has one for each endpoint of a Service with affinity; a size would allocate 2 MiB for each."""
    objects = sample(resource.family)["table objects"]
    key, clients = next((key, value) for key, value in objects.items() if isinstance(value, SetValue) and value.dynamic)
    desired = {key: value for key, value in objects.items() if isinstance(key, ObjectKey) and key.kind == "table"}
    desired.update((ObjectKey("set", f"{key.name}-{number}"), clients) for number in range(300))
    before = slab_mib()
    converge(resource, desired)
    assert slab_mib() - before < 100
    converge(resource, {})


@pytest.mark.parametrize("setting", ["count_connections", "count_bytes"])
@pytest.mark.parametrize("most_elements", [3, transactions.ELEMENTS_PER_TRANSACTION])
def test_counters_are_added_to_a_table_and_removed_from_it(
    resource: NftablesResource, most_elements: int, setting: str
) -> None:
    """Maps are created again with all their elements, also if these are more than a transaction usually has."""
    family, only = resource.family, {"localhost_rejected": ()}
    plain, counted = (
        RENDERING.desired_tables(sample_routes(family), sample_settings(family, **{**only, setting: wanted}))
        for wanted in (False, True)
    )
    with NftablesResource(family, most_elements=most_elements) as cut:
        for desired in (plain, counted, plain):
            converge(cut, desired["table objects"])
            assert ("counter packets" in listed_with_counters(family)) == (desired is counted)
            # Counters are not drift, whatever their values are.
            assert not difference(resource.observe(), desired["table objects"])


EXTERNAL_CHANGES = [
    "delete element {f} kube-proxy cluster-ips {{ {cluster_ip} }}",
    "add element {f} kube-proxy cluster-ips {{ {other} }}",
    "flush set {f} kube-proxy hairpin-connections",
    "flush map {f} kube-proxy service-endpoints",
    "delete element {f} kube-proxy service-endpoints {{ {cluster_ip} . tcp . 80 . 0 }}",
    "add element {f} kube-proxy service-endpoints {{ {cluster_ip} . tcp . 80 . 77 : {other} . 1 }}",
    "add element {f} kube-proxy cluster-ips {{ * }}",
    "add element {f} kube-proxy service-frontends {{ * : goto reject-chain }}",
    "add element {f} kube-proxy service-endpoints {{ * : {other} . 1 }}",
    "flush chain {f} kube-proxy services",
    "add rule {f} kube-proxy cluster-8 drop",
    "insert rule {f} kube-proxy masquerading counter",
    'add rule {f} kube-proxy masquerading meta length 3-5 log prefix "x" limit rate 3/second accept',
    "add chain {f} kube-proxy external",
    "add set {f} kube-proxy external {{ type inet_service; flags interval; elements = {{ 1-5 }}; }}",
    "add map {f} kube-proxy external {{ type inet_service : verdict; elements = {{ 1 : goto reject-chain }}; }}",
    "add chain {f} kube-proxy nat-output {{ policy drop; }}",
    "delete chain {f} kube-proxy filter-output",
    "delete table {f} kube-proxy",
]


@pytest.mark.parametrize("command", EXTERNAL_CHANGES)
def test_manual_changes_are_detected_and_repaired(
    monkeypatch: pytest.MonkeyPatch, resource: NftablesResource, command: str
) -> None:
    """Also where sets are confirmed rather than read, as large ones are."""
    monkeypatch.setattr(parts, "FEWEST_ELEMENTS", 0)
    family = resource.family
    desired = sample(family)["table objects"]
    converge(resource, desired)
    before = read_generation().number
    other = "2001:db8::99" if family == "IPv6" else "192.0.2.99"
    cluster_ip = next(iter(sample_routes(family).values())).cluster_ip
    with TableMonitor([resource.port]) as monitor:
        nft(command.format(f=table_family(family), cluster_ip=cluster_ip, other=other))
        assert select.select([monitor], [], [], 2)[0]
        assert monitor.changes() == {family}
        assert re.fullmatch(r"nft, process \d+", monitor.author)
        assert read_generation().number == before + 1
        assert observed_in_parts(resource, desired) == resource.observe()
        assert converge(resource, desired)
        assert monitor.changes() == set()


@pytest.mark.parametrize("command", EXTERNAL_CHANGES)
def test_a_table_is_repaired_part_by_part_while_it_changes(
    monkeypatch: pytest.MonkeyPatch, resource: NftablesResource, command: str
) -> None:
    """Between two parts, Services are removed, changed and added by transactions of our own."""
    if resource.family == "IPv4":
        # Sets are confirmed rather than read.
        monkeypatch.setattr(parts, "FEWEST_ELEMENTS", 0)
    for name, size in (("ELEMENTS_OF_PART", 5), ("CHAINS_OF_PART", 2), ("_ELEMENTS_OF_REQUEST", 3)):
        monkeypatch.setattr(parts, name, size)
    family = resource.family
    whole = sample(family)["table objects"]
    routes = sample_routes(family)
    fewer = [
        RENDERING.desired_tables(
            {name: route for number, (name, route) in enumerate(routes.items()) if number % 3 != gone},
            sample_settings(family),
        )["table objects"]
        for gone in range(3)
    ]
    desired = dict(whole)
    converge(resource, desired)
    other = "2001:db8::99" if family == "IPv6" else "192.0.2.99"
    cluster_ip = next(iter(routes.values())).cluster_ip
    nft(command.format(f=table_family(family), cluster_ip=cluster_ip, other=other))
    count = 0
    for part in resource.parts(desired):
        resource.apply(part.difference(desired))
        count += 1
        following = [whole, *fewer][count % 4]
        resource.apply(difference(desired, following))
        desired.clear()
        desired.update(following)
    assert count > 5 or "delete table" in command
    assert resource.observe() == desired


def test_own_changes_cause_no_notification(resource: NftablesResource) -> None:
    """A large change of our own neither occupies the agent nor fills the buffer, which would cause a comparison."""
    with TableMonitor([1, resource.port, 2]) as monitor:
        converge(resource, sample(resource.family)["table objects"])
        assert not select.select([monitor], [], [], 0)[0]
        nft(f"add chain {table_family(resource.family)} kube-proxy external")
        assert select.select([monitor], [], [], 2)[0] and monitor.changes() == {resource.family}


def test_objects_of_another_type_are_recreated(resource: NftablesResource) -> None:
    """Replace sets of another type and chains on another hook under our names, with everything that refers to them."""
    desired = sample(resource.family)["table objects"]
    converge(resource, desired)
    for key, value in (
        (ObjectKey("set", "cluster-ips"), desired["set", "cluster-ips"]._replace(dynamic=True, size=10_000)),
        (
            ObjectKey("set", "service-endpoints"),
            desired["set", "service-endpoints"]._replace(dynamic=True, size=10_000),
        ),
    ):
        resource.apply(Change(replaced={key: (desired[key], value)}))
    converge(resource, desired)
    other = ChainValue((), BaseHook("nat", "input", 50))
    resource.apply(Change(replaced={ObjectKey("chain", "nat-output"): (desired["chain", "nat-output"], other)}))
    assert resource.observe()["chain", "nat-output"] == other
    converge(resource, desired)


def test_takeover_of_kube_proxys_own_layout(resource: NftablesResource) -> None:
    """kube-proxy's chains, verdict maps and anonymous sets are replaced; recorded affinity clients are kept."""
    family = table_family(resource.family)
    address = "ipv6_addr" if resource.family == "IPv6" else "ipv4_addr"
    sticky = next(item for item in sample_routes(resource.family).values() if item.affinity_seconds)
    desired = sample(resource.family)["table objects"]
    name = next(key[1] for key in desired if key[0] == "set" and key[1].startswith("affinity-"))
    client = "2001:db8::7" if resource.family == "IPv6" else "192.0.2.7"
    nft(
        f"""table {family} kube-proxy {{
            comment "rules for kube-proxy"
            set cluster-ips {{ type {address}; comment "Active ClusterIPs"; elements = {{ {sticky.cluster_ip} }} }}
            set {name} {{ type {address}; flags dynamic,timeout; timeout {sticky.affinity_seconds}s; size 65535; }}
            map service-ips {{ type {address} . inet_proto . inet_service : verdict; }}
            map firewall-ips {{ type {address} . inet_proto . inet_service : verdict; }}
            chain service-ABC-ns/x/tcp/p {{
                meta l4proto tcp dnat {family} to numgen random mod 1 map {{ 0 : {client} . 80 }}
            }}
            chain services {{ {family} daddr . meta l4proto . th dport vmap @service-ips; }}
            chain firewall-check {{ {family} daddr . meta l4proto . th dport vmap @firewall-ips; }}
            chain nat-prerouting {{ type nat hook prerouting priority -100; jump services; }}
        }}
        add element {family} kube-proxy service-ips {{ {client} . tcp . 80 : goto service-ABC-ns/x/tcp/p }}
        add element {family} kube-proxy {name} {{ {client} }}
        """
    )
    change = converge(resource, desired)
    assert ("chain", "service-ABC-ns/x/tcp/p") in change.removed
    assert ("set", name) not in change.added
    assert ("set", name) not in change.replaced
    assert (
        client
        in subprocess.run(
            ["nft", "list", "set", family, "kube-proxy", name], capture_output=True, text=True, check=True
        ).stdout
    )


def test_a_change_that_conflicts_with_an_external_one_is_still_applied(resource: NftablesResource) -> None:
    desired = sample(resource.family)["table objects"]
    converge(resource, desired)
    routes = sample_routes(resource.family)
    less = RENDERING.desired_tables(dict(list(routes.items())[1:]), sample_settings(resource.family))["table objects"]
    change = difference(desired, less)
    gone = next(iter(routes.values())).cluster_ip
    nft(f"delete element {table_family(resource.family)} kube-proxy cluster-ips {{ {gone} }}")
    resource.apply(change)
    assert not difference(resource.observe(), less)


def test_kernel_errors_name_the_object(resource: NftablesResource) -> None:
    with pytest.raises(KernelError, match=r"element|table"):
        resource.apply(Change(added={ElementKey("element", "cluster-ips", b"\x01\x02\x03\x04"): True}))
    desired = sample(resource.family)["table objects"]
    converge(resource, desired)
    loop = desired["chain", "cluster-8"]._replace(rules=desired["chain", "services"].rules)
    with pytest.raises(KernelError, match="kube-proxy"):
        resource.apply(Change(replaced={ObjectKey("chain", "cluster-8"): (desired["chain", "cluster-8"], loop)}))
    assert not difference(resource.observe(), desired)


def test_many_elements_are_read_completely(resource: NftablesResource) -> None:
    """Read right after a large load, while the kernel still resizes its hash tables."""
    size = 16 if resource.family == "IPv6" else 4
    desired = sample(resource.family)["table objects"]
    added: dict[tuple[Any, ...], Any] = {
        ElementKey("element", "cluster-ips", number.to_bytes(size, "big")): True for number in range(1, 60_000)
    }
    desired.update(added)
    converge(resource, desired)
    assert resource.longest_call < 5


def test_large_sets_that_are_as_expected_are_not_dumped(
    monkeypatch: pytest.MonkeyPatch, resource: NftablesResource
) -> None:
    monkeypatch.setattr(parts, "FEWEST_ELEMENTS", 0)
    monkeypatch.setattr(parts, "_ELEMENTS_OF_REQUEST", 7)
    desired = sample(resource.family)["table objects"]
    converge(resource, desired)
    if not any(count for _value, count in resource._reader().counted_sets().values()):
        pytest.skip("this kernel does not report the number of elements")
    dumped: list[str] = []
    dump = observation.Reader.elements

    def recorded(self: observation.Reader, name: str, count: Optional[int] = None) -> dict[bytes, Any]:
        dumped.append(name)
        return dump(self, name, count)

    monkeypatch.setattr(observation.Reader, "elements", recorded)
    assert observed_in_parts(resource, desired) == desired
    assert not dumped
    assert resource.observe() == desired and dumped


def test_a_large_change_reports_progress_within_one_call(resource: NftablesResource) -> None:
    """Report progress for each transaction and each datagram of a dump, so that the service manager sees it running."""
    size = 16 if resource.family == "IPv6" else 4
    desired = sample(resource.family)["table objects"]
    numbers = range(1, 50_000)
    desired.update({ElementKey("element", "cluster-ips", number.to_bytes(size, "big")): True for number in numbers})
    change = difference(resource.observe(), desired)
    calls: list[str] = []
    resource.report_to(lambda: calls.append("progress"))
    resource.apply(change)
    assert len(calls) >= 50_000 // transactions.ELEMENTS_PER_TRANSACTION
    calls.clear()
    assert resource.observe() == desired
    assert len(calls) > 10


def test_a_table_is_found_when_no_module_list_names_nf_tables(monkeypatch):
    """As on a kernel that has nf_tables built in and installs neither module lists nor its configuration."""
    assert answers()
    monkeypatch.setattr(handles, "asking_loads", lambda _name, _release: False)
    assert handles.KernelHandles.has_nftables()
    monkeypatch.setattr(handles, "asking_loads", lambda _name, _release: True)
    assert not handles.KernelHandles.has_nftables()
