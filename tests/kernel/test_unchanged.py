# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run of service_proxy ends early only if input, engine and kernel are as they were after the last complete run.

Each test makes a change that such a run must not miss. The field ``observed`` of the result shows which runs were
complete; that a complete run finds a change is verified by other tests.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.snapshot import canonical_snapshot
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.lock import AGENT, ConvergenceLock
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.unchanged import (
    decision,
    inputs,
    record,
    surroundings,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.errors import KernelError, ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules import loaded_modules
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import resource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.generation import Generation
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import NftablesResource
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.arguments import proxy_spec, source_spec
from ansible_collections.kubenode.proxy.plugins.modules import service_proxy
from tests.kernel.convergence_node import endpoint_slices, service
from tests.lab import system

NODE = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": "node-1"}, "status": {"addresses": []}}
OBJECTS: List[Any] = [
    NODE,
    service("plain", 1),
    service("named", 2, protocol="UDP"),
    *endpoint_slices("plain", 1, 3),
    *endpoint_slices("named", 2, 2, "UDP"),
]
ETH0 = ["link add eth0 type veth peer name peer0", "address add 192.0.2.1/24 dev eth0"]
#: Fields of a result that may differ between two complete runs, or say which of them was one.
VARIABLE = ("durations", "observed")


class StandIn:
    """Stands in for AnsibleModule: options with their defaults, and the warnings."""

    def __init__(self, options: Dict[str, Any], check: bool, diff: bool) -> None:
        spec: Dict[str, Any] = {**source_spec(), **proxy_spec()}
        self.params = {**{name: item.get("default") for name, item in spec.items()}, **options}
        self.check_mode, self._diff = check, diff
        self.warnings: List[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class Node:
    """Runs the module on a node whose files are in a scratch directory."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self.snapshot = directory / "snapshot.json.gz"
        self.static = directory / "services.d"
        self.static.mkdir()
        self.write(OBJECTS)
        self.options: Dict[str, Any] = {
            "state": "present",
            "snapshot": str(self.snapshot),
            "node_name": "node-1",
            "mode": "nftables",
            "configuration": {"nodePortAddresses": ["primary"]},
            "node_configuration": {"staticServices": {"directory": str(self.static)}},
            "state_directory": str(self.state),
            "history_directory": str(directory / "history"),
            "keep_states": 5,
            "confirm_timeout": 0.0,
            "max_loss_percent": 50.0,
            "unattended": False,
            "always_observe": False,
            "ignore_findings": ["incomplete-snapshot"],
        }

    @property
    def record(self) -> Path:
        return self.state / record.FILE

    def write(self, objects: List[Any]) -> None:
        """Write the snapshot, older than a moment, so that a record of it is possible."""
        self.snapshot.write_bytes(gzip.compress(canonical_snapshot(objects)[0], mtime=0))
        time.sleep(0.06)

    def run(self, check: bool = False, diff: bool = False, **more: Any) -> Dict[str, Any]:
        """Run the module and return its result, with its warnings."""
        module = StandIn({**self.options, **more}, check, diff)
        result = service_proxy.perform(module)  # type: ignore[arg-type]
        return {**result, "warnings": module.warnings}

    def settle(self, **more: Any) -> Dict[str, Any]:
        """Run until a run ends early, and return its result: the second, or the third if the first loads modules."""
        before = set(loaded_modules())
        self.run(**more)
        if set(loaded_modules()) != before:
            self.run(**more)
        result = self.run(**more)
        assert not result["observed"] and not result["changed"], result
        return result

    def must_observe(self, what: str, **more: Any) -> Dict[str, Any]:
        """Check that the next run is complete."""
        result = self.run(**more)
        assert result["observed"], what
        return result


@pytest.fixture
def node(tmp_path: Path) -> Node:
    system.ip_batch(
        ["link add eth0 type veth peer name peer0", "address add 192.0.2.1/24 dev eth0", "link set eth0 up"]
    )
    return Node(tmp_path)


def nft(*lines: str) -> None:
    subprocess.run(["nft", "-f", "-"], input="\n".join(lines), text=True, check=True)


TIMEOUT = "net.netfilter.nf_conntrack_tcp_timeout_close_wait"


def set_timeout(seconds: int) -> None:
    write(f"/proc/sys/{TIMEOUT.replace('.', '/')}", str(seconds))


def write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="ascii")


def test_the_result_is_that_of_a_complete_run(node: Node) -> None:
    node.write([*OBJECTS, service("broken", 3, "Nonsense")])
    early = node.settle()
    complete = node.run(always_observe=True)
    assert complete["observed"] and complete["warnings"] and complete["refused_count"] == 1
    assert set(early) == set(complete)
    for name in set(complete).difference(VARIABLE):
        assert early[name] == complete[name], name
    assert list(early["durations"]) == ["unchanged"]
    # A run that observes in any case leaves no record.
    assert not node.record.exists()


#: What other programs do to the tables; ours have the family ip and ip6.
TABLES = [
    "add rule ip kube-proxy services counter",
    "flush chain ip kube-proxy services",
    "add chain ip kube-proxy others",
    "add set ip6 kube-proxy others { type ipv6_addr; }",
    "delete element ip kube-proxy service-endpoints-of-nobody { 1 }",
    "add table ip kube-proxy { flags dormant; }",
    "delete table ip6 kube-proxy",
    "add table ip kubenode-ipvs",
    "add table inet other { chain kept { type filter hook input priority 10; tcp dport 9 drop; }; }",
    "add rule inet other kept udp dport 9 drop",
    "delete table inet other",
]


def test_changes_of_tables(node: Node) -> None:
    node.settle()
    for line in TABLES:
        if "of-nobody" in line:
            listed = json.loads(subprocess.check_output(["nft", "-j", "list", "table", "ip", "kube-proxy"]))
            maps = [item["map"] for item in listed["nftables"] if "map" in item and item["map"].get("elem")]
            nft(f"flush map ip kube-proxy {maps[0]['name']}")
        else:
            nft(line)
        node.must_observe(line)
        assert not node.run()["observed"], line


def test_a_change_during_the_run_leaves_no_record(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.settle()
    real = NftablesResource.apply

    def between(self: NftablesResource, change: Any) -> None:
        real(self, change)
        nft("add table inet other")

    nft("flush chain ip kube-proxy services")
    with monkeypatch.context() as patch:
        patch.setattr(NftablesResource, "apply", between)
        assert node.run()["changed"] and not node.record.exists()
    node.settle()
    # One transaction of another program and one of its own that the kernel has not reported.
    monkeypatch.setattr(resource, "_generation_in", lambda replies: 0)
    nft("flush chain ip kube-proxy services")
    assert node.run()["changed"] and not node.record.exists()


def test_a_refused_transaction_is_no_change(node: Node) -> None:
    node.settle()
    done = subprocess.run(
        ["nft", "add", "rule", "ip", "kube-proxy", "nowhere", "drop"], capture_output=True, check=False
    )
    assert done.returncode and not node.run()["observed"]


def test_iptables_of_both_variants(node: Node) -> None:
    node.settle()
    subprocess.run(["iptables-nft", "-t", "nat", "-N", "KUBE-SERVICES"], check=True)
    assert node.must_observe("a chain of iptables-nft")["counts"]["removed"]
    node.settle()
    subprocess.run(["iptables-legacy", "-t", "nat", "-N", "KUBE-SERVICES"], check=True)
    assert node.must_observe("a chain of iptables-legacy")["counts"]["removed"]
    for _run in range(3):
        node.must_observe("legacy tables, which have no generation")


def test_devices_addresses_and_ipsets(node: Node) -> None:
    node.settle()
    for line in ("address add 192.0.2.2/24 dev eth0", "address del 192.0.2.2/24 dev eth0"):
        system.ip_batch([line])
        node.must_observe(line)
    system.ip_batch(["link add kube-ipvs0 type veth peer name others"])
    with pytest.raises(KernelError, match="kube-ipvs0"):
        node.run()
    system.ip_batch(["link del kube-ipvs0"])
    node.settle()
    subprocess.run(["ipset", "create", "OTHERS", "hash:ip"], check=True)
    assert not node.run()["observed"], "an ipset that no mode makes"
    subprocess.run(["ipset", "create", "KUBE-CLUSTER-IP", "hash:ip,port"], check=True)
    assert node.must_observe("an ipset of ipvs mode")["changed"]


def test_kernel_parameters(node: Node) -> None:
    node.settle()
    keys = json.loads(node.record.read_text().partition("\n")[2])["state"]["sysctls"]
    changeable = [key for key, value in keys.items() if value[1:] == [True]]
    assert TIMEOUT in changeable
    set_timeout(17)
    assert node.must_observe("a parameter")["changed"]
    node.settle()
    write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1")
    node.must_observe("a parameter that decides about the families")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_modules", ["nf_tables"]),
        ("_parameters", {"hashsize": "1"}),
        ("_programs", []),
        ("_namespace", [4, 4026531833, 99]),
        ("_capabilities", "0000000000003000"),
        ("read_generation", Generation(0, "")),
    ],
)
def test_what_a_test_cannot_change(node: Node, monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    node.settle()
    monkeypatch.setattr(surroundings, name, lambda: value)
    node.must_observe(name)


def test_generation_that_wraps_around_or_starts_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.settle()
    real = surroundings.read_generation()
    for number in (1, real.number - 1, 0xFFFFFFFF):
        with monkeypatch.context() as patch:
            patch.setattr(surroundings, "read_generation", lambda number=number: Generation(number, real.tables))
            assert isinstance(ask(node), decision.Changed)
    # The same number of other tables, for example after all 2^32 numbers; and a record older than that could take.
    with monkeypatch.context() as patch:
        patch.setattr(surroundings, "read_generation", lambda: Generation(real.number, "0"))
        assert isinstance(ask(node), decision.Changed)
    with monkeypatch.context() as patch:
        patch.setattr(decision, "boot_seconds", lambda: surroundings.boot_seconds() + decision.LONGEST_SECONDS)
        assert isinstance(ask(node), decision.Changed)
    with monkeypatch.context() as patch:
        patch.setattr(decision, "boot_seconds", lambda: 0.0)
        assert isinstance(ask(node), decision.Changed)
    assert isinstance(ask(node), decision.Unchanged)


def ask(node: Node, lock_timeout: float = 1.0) -> decision.Decision:
    """Ask whether a run may end early, without a run."""
    options = StandIn(node.options, False, False).params
    return decision.decide(decision.Question(options, [str(node.snapshot)], str(node.state), lock_timeout))


def test_another_boot(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.settle()
    real = surroundings._required
    monkeypatch.setattr(surroundings, "_required", lambda path: "another" if "boot_id" in path else real(path))
    node.must_observe("another boot")


def test_another_network_namespace(node: Node) -> None:
    node.settle()
    with another_namespace():
        result = node.must_observe("an empty namespace")
        assert result["changed"]
    node.must_observe("the first namespace again")


@contextlib.contextmanager
def another_namespace() -> Iterator[None]:
    descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    system.unshare(system.CLONE_NEWNET)
    try:
        system.ip_batch(
            ["link set lo up", "link add eth0 type veth peer name peer0", "address add 192.0.2.1/24 dev eth0"]
        )
        yield
    finally:
        system.enter(f"/proc/self/fd/{descriptor}", system.CLONE_NEWNET)
        os.close(descriptor)


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def resigned(change: Callable[[Dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return what changes the document in a record, with the right digest."""

    def apply(path: Path) -> None:
        document = json.loads(path.read_bytes().partition(b"\n")[2])
        change(document)
        text = json.dumps(document, sort_keys=True).encode()
        path.write_bytes(record._digest(text) + b"\n" + text)

    return apply


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_hard_link(path: Path) -> None:
    os.link(path, path.with_name("another-name"))


RECORDS: Dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "empty": lambda path: path.write_bytes(b"") and None,
    "damaged": damaged,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a FIFO": a_fifo,
    "a symbolic link": a_link,
    "a hard link": a_hard_link,
    "of another user": lambda path: os.chown(path, 65534, -1),
    "writable by others": lambda path: path.chmod(0o620),
    "of another version": resigned(lambda document: document.update(version=2)),
    "without a part": resigned(lambda document: document.pop("state") and None),
    "with an unusable part": resigned(lambda document: document.update(state={"sysctls": 7})),
    "of another engine": resigned(lambda document: document["given"].update(engine="0")),
    "with a part of another type": resigned(lambda document: document.update(given=[])),
    "of no object": lambda path: path.write_bytes(record._digest(b"7") + b"\n7") and None,
}


def test_unusable_records(node: Node) -> None:
    node.settle()
    for what, change in RECORDS.items():
        change(node.record)
        node.must_observe(what)
        assert not node.run()["observed"], f"the record after one that was {what}"
        assert node.record.stat().st_mode & 0o777 == 0o600


def test_an_engine_that_was_replaced(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.settle()
    monkeypatch.setattr(decision, "engine_digest", lambda: "another")
    node.must_observe("another engine")


def test_other_input(node: Node) -> None:
    node.settle()
    for options in (
        {"max_loss_percent": 49.0},
        {"configuration": {"nodePortAddresses": ["primary"], "clusterCIDR": "10.244.0.0/16"}},
        {"node_name": "node-1", "outside_host": True},
        {"mode": "auto"},
        {"always_observe": True},
    ):
        node.must_observe(str(options), **options)
    node.settle()
    node.write([*OBJECTS, service("new", 9), *endpoint_slices("new", 9, 1)])
    assert node.must_observe("another snapshot")["changed"]
    node.settle()
    manifest = [service("static", 12), *endpoint_slices("static", 12, 1)]
    (node.static / "own.json").write_text(json.dumps({"kind": "List", "items": manifest}))
    time.sleep(0.06)
    assert node.must_observe("a static Service")["changed"]
    node.settle()
    (node.static / "own.json").unlink()
    time.sleep(0.06)
    assert node.must_observe("a static Service that was removed")["changed"]


def test_the_configuration_in_a_file(node: Node) -> None:
    path = node.snapshot.with_name("config.json")
    text = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
    path.write_text(json.dumps(text))
    time.sleep(0.06)
    options = {"config": str(path), "configuration": None}
    node.settle(**options)
    path.write_text(json.dumps({**text, "nodePortAddresses": ["primary"]}))
    node.must_observe("another configuration", **options)


def test_the_snapshot_as_a_fifo_is_read_once(node: Node) -> None:
    node.settle()
    content = node.snapshot.read_bytes()
    node.snapshot.unlink()
    os.mkfifo(node.snapshot)
    for _run in range(2):
        writer = subprocess.Popen(["sh", "-c", f"cat > {node.snapshot}"], stdin=subprocess.PIPE)
        assert writer.stdin is not None
        writer.stdin.write(content)
        writer.stdin.close()
        assert node.run()["observed"]
        assert writer.wait() == 0


def test_files_that_change_during_the_run(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real = surroundings.surroundings

    def touch(*arguments: Any) -> Any:
        os.utime(node.snapshot)
        return real(*arguments)

    monkeypatch.setattr(
        "ansible_collections.kubenode.proxy.plugins.module_utils.convergence.unchanged.recorder.surroundings", touch
    )
    assert node.run()["observed"] and not node.record.exists()


def test_modes_without_a_generation(node: Node) -> None:
    node.settle()
    for _run in range(3):
        node.must_observe("iptables mode", mode="iptables")
    assert not node.record.exists()


def test_checks_diffs_and_confirmed_changes_observe(node: Node) -> None:
    node.settle()
    before = node.record.read_bytes()
    assert node.run(check=True)["observed"] and node.run(diff=True, check=True)["observed"]
    assert node.record.read_bytes() == before and not node.run()["observed"], "a check changes nothing"
    shown = node.run(diff=True)
    assert shown["observed"] and shown["diff"] == []
    early = node.run()
    assert not early["observed"] and "diff" not in early
    with pytest.raises(ProxyError, match="confirm_timeout"):
        node.run(confirm_timeout=60.0, keep_states=0)


def test_a_change_that_waits_to_be_confirmed(node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node.settle()
    monkeypatch.setattr(surroundings, "PENDING", str(tmp_path))
    node.must_observe("a pending change")


def test_runs_that_failed_or_were_killed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.settle()
    ledger = node.state / "ledger.json"
    ledger.write_text("{}")
    node.must_observe("another ledger")
    node.settle()
    for error in (KernelError("refused"), KeyboardInterrupt()):

        def refuse(*_arguments: Any, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(NftablesResource, "apply", refuse)
            set_timeout(17)
            nft("flush chain ip kube-proxy services")
            node.run()
        assert not node.record.exists()
        assert node.must_observe("a run that failed")["changed"]
        node.settle()


def test_a_running_agent_and_a_lock_that_is_held(node: Node) -> None:
    node.settle()
    with ConvergenceLock(str(node.state), 1.0, AGENT), pytest.raises(KernelError, match="agent"):
        node.run()
    with ConvergenceLock(str(node.state), 1.0), pytest.raises(KernelError, match="did not end"):
        ask(node, lock_timeout=0.0)
    assert not node.run()["observed"]


def test_network_policies_are_observed(node: Node) -> None:
    policies = {**node.options["node_configuration"], "networkPolicy": {"enabled": True}}
    for _run in range(3):
        node.must_observe("network policies", node_configuration=policies)


def test_static_services_with_health_checks(node: Node) -> None:
    """A one-shot run checks no endpoint, so its result does not depend on the checks."""
    checked = service("checked", 12)
    checked["metadata"]["annotations"] = {"service-proxy.kubenode.io/health-check": "tcp"}
    (node.static / "own.json").write_text(json.dumps([checked, *endpoint_slices("checked", 12, 1)]))
    time.sleep(0.06)
    node.settle()
    complete = node.run(always_observe=True)
    assert not complete["changed"]


def test_kube_proxy_is_noticed(node: Node) -> None:
    node.settle()
    program, script = "kube-proxy", "import sys; print(flush=True); sys.stdin.read()"
    running = subprocess.Popen(
        [program, "-c", script],
        executable="/usr/bin/python3",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert running.stdout is not None
        running.stdout.readline()
        with pytest.raises(ProxyError, match="kube-proxy runs on this node"):
            node.run()
    finally:
        running.kill()
        running.communicate()
    node.must_observe("after a run that failed")


def test_removal_leaves_no_record(node: Node) -> None:
    node.settle()
    node.run(state="absent", snapshot=None)
    assert not node.record.exists()


def test_unprivileged_users_keep_no_records(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.settle()
    monkeypatch.setattr(decision.os, "geteuid", lambda: 1000)
    assert isinstance(ask(node), decision.Changed)


def test_names_that_begin_like_a_record(node: Node) -> None:
    node.settle()
    left = node.state / f".{record.FILE}.abcdef"
    left.write_text("a writer was killed")
    record.forget_record(str(node.state))
    assert not left.exists() and not node.record.exists()


def test_digests_of_special_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(inputs.Unusable):
        inputs.read_files([str(tmp_path / "fifo")], "")
    with pytest.raises(OSError, match="not a regular file"):
        inputs.read_files([], str(tmp_path))
