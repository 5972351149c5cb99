# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reboots of a node that was converged once: it serves its last state before kubelet starts, without an API server."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from tests.apiserver.tls import write_kubeconfig
from tests.lab import manifests
from tests.waiting import wait_for

from .agent import KubeProxy
from .cluster import node as node_object
from .cluster import service
from .node import Node, play, run_playbook
from .test_confirm import address_of, programmed

UNIT = "kubenode-proxy-boot.service"
AGAIN = "kubenode-proxy-boot-again"
DIRECTORY = "/var/lib/kubenode-proxy-boot"
STATE = f"{DIRECTORY}/state.json.gz"
LOCAL, REMOTE = "10.244.1.2", "10.244.9.9"
# As early as a distribution's kubelet, and all that a boot needs has started before it.
KUBELET = """\
[Unit]
After=network-online.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'iptables-nft-save >/run/seen-by-kubelet; nft list ruleset >>/run/seen-by-kubelet'

[Install]
WantedBy=multi-user.target
"""
# As Debian's packages nftables and iptables-persistent are ordered. What they restore was saved on a node that served.
FLUSHING = """\
#!/usr/sbin/nft -f
flush ruleset
"""
PERSISTENT = """\
[Unit]
DefaultDependencies=no
Wants=network-pre.target systemd-modules-load.service local-fs.target
Before=network-pre.target shutdown.target
After=systemd-modules-load.service local-fs.target nftables.service
Conflicts=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=-/bin/sh -c 'iptables-nft-restore </etc/iptables.rules'

[Install]
WantedBy=multi-user.target
"""
# As administrators write it, and the script of Debian's package ipvsadm.
LATE = """\
[Unit]
Wants=network.target network-online.target
After=network.target network-online.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=true

[Install]
WantedBy=multi-user.target
"""
NETWORK = ("network-pre.target", "network.target", "network-online.target")


@pytest.fixture(scope="module")
def node(start):
    found = start("oneshot")
    found.write("/etc/nftables.conf", FLUSHING)
    for name, text in (("kubelet", KUBELET), ("netfilter-persistent", PERSISTENT), ("iptables", LATE)):
        found.write(f"/etc/systemd/system/{name}.service", text)
        found.run("systemctl", "enable", f"{name}.service")
    found.run("systemctl", "enable", "nftables.service")
    return found


def snapshot(node: Node, *names: str) -> str:
    """Write a snapshot with a Service of each name, at 10.96.0.NUMBER, and return its path on this machine."""
    endpoints = [
        manifests.endpoint(REMOTE, "elsewhere"),
        manifests.endpoint(LOCAL, node.name),
        manifests.endpoint(address_of(node), node.name),
    ]
    items = [node_object(node.name, address_of(node)), service("kubernetes", "10.96.0.1")]
    items += [manifests.api_servers(["192.0.2.1"], 8080)]
    for number, name in enumerate(names, 10):
        ports = [manifests.port(8080, name="tcp-web")]
        items += [service(name, f"10.96.0.{number}"), manifests.endpoint_slice(name, endpoints, ports)]
    path = node.scratch / "snapshot.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    return str(path)


def converge(node: Node, mode: str, *names: str, **variables: object):
    given = {"service_proxy_mode": mode, "service_proxy_snapshot": snapshot(node, *names), **variables}
    return node.role("service_proxy", given)


def booted(node: Node) -> str:
    """Reboot the node and return what its unit has logged in this boot."""
    node.output("journalctl", "--rotate", "--vacuum-time=1s")
    # A container may keep its network namespace, but a machine that boots has no rules.
    node.run("nft", "flush", "ruleset")
    assert "10.96" not in programmed(node)
    node.reboot()
    assert node.unit("kubelet.service", "ActiveState") == {"ActiveState": "active"}
    # None was dropped in order to break a cycle, and each program has started after what it needs.
    assert {name: node.unit(name, "ActiveState")["ActiveState"] for name in NETWORK} == dict.fromkeys(NETWORK, "active")
    return node.log(UNIT)


def own_lines(node: Node) -> Counter:
    """Return the lines of what serves Services, with a name for the node's address, which each boot may change.

    Chains of endpoints are named by a hash of the address.

    What is restored at boot beside it may have tables and chains of others, and lists chains and elements in another
    order.
    """
    text = re.sub(r"KUBE-SEP-\w+", "KUBE-SEP", programmed(node).replace(address_of(node), "OWN"))
    parts = map(str.strip, re.split(r"[{},\n]", text))
    return Counter(part for part in parts if "KUBE-" in part or "10.2" in part or "10.96" in part)


@pytest.mark.parametrize("mode", ["nftables", pytest.param("iptables", marks=pytest.mark.full)])
def test_a_node_boots_alone_with_its_last_state(node, mode):
    result = converge(node, mode, "web")
    assert "kubenode.proxy.service_proxy : Restore the state at every boot" in result.changed_tasks
    before = programmed(node)
    own, address = own_lines(node), address_of(node)
    assert LOCAL in before and REMOTE in before
    node.run("sh", "-c", "iptables-nft-save >/etc/iptables.rules")
    log = booted(node)
    order = [
        node.unit(name, "ExecMainStartTimestampMonotonic")
        for name in ("nftables.service", "netfilter-persistent.service", UNIT, "kubelet.service")
    ]
    times = [int(item["ExecMainStartTimestampMonotonic"]) for item in order]
    assert 0 < times[0] <= times[1] < times[2] < times[3], times
    assert f"is restored in {mode} mode: 2 Services" in log, log
    # Before kubelet, with the remote endpoint and that in the host's network, without the pod that has ended.
    seen = node.output("cat", "/run/seen-by-kubelet")
    assert REMOTE in seen and address in seen and LOCAL not in seen, (log, seen)
    assert "10.96.0.10" in seen
    given = {"service_proxy_mode": mode, "service_proxy_snapshot": str(node.scratch / "snapshot.json")}
    found = run_playbook([node], "kubenode.proxy.verify", given, {}, failing=True)[node.name]
    assert "(it has booted with its state of 20" in found.output, found.output
    # The next run only adds what the boot has omitted.
    again = converge(node, mode, "web")
    assert own_lines(node) == own, again.output
    assert converge(node, mode, "web").changed == 0
    # Started by hand, the unit does not restore an older state.
    node.run("systemctl", "restart", UNIT)
    assert LOCAL in programmed(node) and "has converged since it booted" in node.log(UNIT)
    node.run("rm", "/etc/iptables.rules")
    assert node.unit(f"{AGAIN}.timer", "ActiveState") == {"ActiveState": "active"}
    node.role("service_proxy", {"service_proxy_state": "absent", "service_proxy_leave_unserved": True})
    assert node.unit(f"{AGAIN}.timer", "ActiveState") == {"ActiveState": "inactive"}
    assert node.run("test", "-e", DIRECTORY, check=False).returncode
    assert node.unit(UNIT, "LoadState") == {"LoadState": "not-found"}


def test_what_was_restored_goes_once_kube_proxy_has_returned(node):
    converge(node, "nftables", "web")
    assert "is restored in nftables mode" in booted(node)
    restored = programmed(node)
    assert node.unit(f"{AGAIN}.timer", "ActiveState") == {"ActiveState": "active"}
    node.run("systemctl", "start", f"{AGAIN}.service")
    assert programmed(node) == restored
    with KubeProxy(node):
        node.run("systemctl", "start", f"{AGAIN}.service")
        assert "kube-proxy runs on this node" in node.log(f"{AGAIN}.service")
        assert "table ip kube-proxy" not in programmed(node) and "KUBE-SVC-STANDIN" in programmed(node)
    assert node.unit(f"{AGAIN}.timer", "ActiveState") == {"ActiveState": "inactive"}
    assert "is restored" not in booted(node) and "10.96.0" not in programmed(node)
    node.run("sh", "-c", "iptables-nft-save | grep -v STANDIN | iptables-nft-restore")


@pytest.mark.full
def test_only_a_confirmed_state_counts_and_a_rollback_brings_back_its_own(node):
    converge(node, "nftables", "first")
    unconfirmed = {"mode": "nftables", "boot": True, "confirm_timeout": 900, "node_name": node.name}
    snapshot(node, "first", "second")
    node.copy(node.scratch / "snapshot.json", "/srv/second.json")
    module = "kubenode.proxy.service_proxy"
    play([node], [{module: {**unconfirmed, "snapshot": "/srv/second.json"}}], {})
    assert "10.96.0.11" in programmed(node)
    booted(node)
    assert "10.96.0.10" in programmed(node) and "10.96.0.11" not in programmed(node)
    play([node], [{module: {**unconfirmed, "snapshot": "/srv/second.json"}}], {})
    play([node], [{"kubenode.proxy.service_proxy_confirm": {}}], {})
    booted(node)
    assert "10.96.0.11" in programmed(node)
    converge(node, "nftables", "first", "second")
    converge(node, "iptables", "first", "second", "third")
    play([node], [{"kubenode.proxy.service_proxy_rollback": {"accept_loss": True}}], {})
    assert "is restored in nftables mode: 3 Services" in booted(node)
    assert "10.96.0.12" not in programmed(node)


@pytest.mark.full
def test_of_an_old_state_only_what_everything_needs_is_restored(node):
    converge(node, "nftables", "web")
    node.run("touch", "-d", "8 days ago", STATE)
    log = booted(node)
    assert "it is too old, so only the API server, DNS" in log, log
    assert "10.96.0.1" in programmed(node) and "10.96.0.10" not in programmed(node)
    # A run without changes keeps it young.
    converge(node, "nftables", "web")
    node.run("touch", "-d", "8 days ago", STATE)
    assert converge(node, "nftables", "web").changed == 0
    assert "is too old" not in booted(node)


@pytest.mark.parametrize("user", ["kubenode-proxy", pytest.param("root", marks=pytest.mark.full)])
def test_scheduled_runs_renew_the_state(node, user):
    """Only root writes what root restores: it takes the cluster state that runs of another user have programmed."""
    converge(node, "nftables", "web")
    node.run("touch", "-d", "8 days ago", STATE)
    snapshot(node, "web", "later")
    node.copy(node.scratch / "snapshot.json", "/srv/boot.json")
    given = {"schedule_snapshot": "/srv/boot.json", "agent_user": user, "agent_configuration": {"mode": "nftables"}}
    node.role("schedule", given)
    log = node.log("kubenode-proxy-schedule.service")
    assert node.output("find", STATE, "-mmin", "-10", "-user", "root", "-perm", "600").strip() == STATE, log
    assert "is not kept" not in log and "is not renewed" not in log, log
    node.role("schedule", {"schedule_state": "absent"})
    log = booted(node)
    assert "3 Services with" in log and "is too old" not in log and "10.96.0.11" in programmed(node), log
    # A run of the role with what it had before replaces what was taken.
    converge(node, "nftables", "web")
    assert "2 Services with" in booted(node)


def test_the_state_outlasts_an_agent(node, cluster, variables, tmp_path):
    """It serves from its own copy once it has followed the cluster, and leaves that for the boot when it ends."""
    converge(node, "nftables", "web")
    wrong = write_kubeconfig(tmp_path / "kubeconfig", cluster.url, cluster.admin[0], "wrong")
    given = {**variables, "agent_configuration": {"mode": "nftables"}}
    node.role("agent", {**given, "agent_kubeconfig": str(wrong)})
    assert "2 Services with" in booted(node)
    node.role("agent", given)
    cluster.store.put(service("later", "10.96.0.12"))
    wait_for(lambda: "10.96.0.12" in programmed(node), what="the agent serves the Service")
    assert "serves this node from its own copy" in booted(node)
    wait_for(lambda: "10.96.0.12" in programmed(node), what="the agent serves the Service again")
    node.role("agent", {**given, "agent_state": "absent"})
    assert "is restored in nftables mode" in booted(node)
    assert "10.96.0.12" in programmed(node)


@pytest.mark.full
def test_a_state_that_cannot_be_used_leaves_a_fresh_node_that_starts_kubelet(node):
    converge(node, "nftables", "web")
    node.run("truncate", "--size=-100", STATE)
    log = booted(node)
    assert f"nothing is restored: {STATE}: the cached cluster state is damaged" in log, log
    assert "10.96" not in programmed(node)
    node.write(f"{DIRECTORY}/boot.pyz", "not a program")
    booted(node)
    converge(node, "nftables", "web")
    node.run("rm", STATE)
    converge(node, "nftables", "web")
    assert "is restored" in booted(node)
    # Where the unit cannot be written, the run says so before it changes anything.
    units = "/etc/systemd/system"
    node.run("rm", f"{units}/{UNIT}")
    node.run("mount", "--bind", "-o", "ro", units, units)
    given = {"service_proxy_mode": "nftables", "service_proxy_snapshot": snapshot(node, "web", "more")}
    refused = node.role("service_proxy", given, failing=True)
    node.run("umount", units)
    assert f"service_proxy_boot: {units}/{UNIT}" in refused.output, refused.output
    assert refused.changed == 0 and "10.96.0.11" not in programmed(node)
    converge(node, "nftables", "web")
    done = converge(node, "nftables", "web", service_proxy_boot=False)
    assert "kubenode.proxy.service_proxy : Remove the unit and the state" in done.changed_tasks
    assert node.run("test", "-e", DIRECTORY, check=False).returncode
    booted(node)
    assert "10.96" not in programmed(node)
