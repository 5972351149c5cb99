# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The modules service_proxy and service_proxy_info, through Ansible, in iptables mode on a namespace node.

The node's state is read with iptables-save and ls, never with the modules themselves.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from pathlib import Path

import pytest

from tests.lab import manifests
from tests.modules.harness import ROOT, UNPRIVILEGED

SNAPSHOT = ROOT / "tests" / "lab" / "demo" / "cluster.json"
MODULE = "kubenode.proxy.service_proxy"
INFO = "kubenode.proxy.service_proxy_info"
CONFIGURATION = {"clusterCIDR": "10.244.0.0/16,fd00:10:244::/48", "detectLocalMode": "ClusterCIDR"}
SERVE = {
    "snapshot": str(SNAPSHOT),
    "node_name": "lab-iptables",
    "mode": "iptables",
    "configuration": CONFIGURATION,
}
# Rules of both variants without comments and counters, links, addresses, kernel parameters, and all visible files.
LOOK = [
    "sh",
    "-c",
    "for save in iptables-nft-save ip6tables-nft-save iptables-legacy-save ip6tables-legacy-save; do "
    "$save 2>/dev/null | grep -v '^#' | sed 's/\\[[0-9:]*\\]//'; done; "
    "ip -br address; sysctl net.ipv4.conf.all.route_localnet; "
    "find /run /etc/modules-load.d /etc/sysctl.d -type f | sort",
]


def service(name, ports, **spec):
    """Return a ClusterIP Service as the API server would show it."""
    return manifests.service(name, spec.pop("clusterIP", "10.96.0.50"), ports, namespace="shop", **spec)


def slice_of(name, addresses, port):
    """Return an EndpointSlice of the Service ``name``."""
    return manifests.endpoint_slice(name, map(manifests.endpoint, addresses), [manifests.port(port)], namespace="shop")


def rules(node):
    """Return the output of LOOK without the lock file that every convergence leaves, even a refused one."""
    return node.run(*LOOK).stdout.replace("/run/kubenode-proxy/lock\n", "")


def test_check_apply_repeat_and_remove(node):
    external_rule = "iptables -t nat -A PREROUTING -d 192.0.2.99 -j DNAT --to-destination 192.0.2.1"
    node.run("sh", "-c", f"{external_rule} && iptables -N MINE && iptables -A MINE -j RETURN")
    untouched = rules(node)
    runs = node.four_runs("service_proxy", SERVE, verify=LOOK)
    assert "KUBE-" not in runs.before and "192.0.2.99" in runs.before
    for line in ("-A KUBE-SERVICES", ":KUBE-MARK-MASQ", "-A PREROUTING -d 192.0.2.99/32", "-A MINE -j RETURN"):
        assert line in runs.after, line
    first, second = runs.first, runs.second
    assert (first["mode"], first["node_name"], first["families"]) == ("iptables", "lab-iptables", ["IPv4", "IPv6"])
    assert re.match(r"iptables [0-9.]+ \((legacy|nft)\b", first["variant"])
    assert first["counts"]["services"] > 8 and first["counts"]["added"] > 50
    assert second["counts"]["services"] == first["counts"]["services"]
    assert {key: second["counts"][key] for key in ("added", "replaced", "removed")} == dict.fromkeys(
        ("added", "replaced", "removed"), 0
    )
    assert first["refused"] == [] and first["refused_count"] == 0
    assert first["durations"] and all(seconds >= 0 for seconds in first["durations"].values())
    shown = "".join(entry["after"] for entry in first["diff"])
    assert "-A KUBE-SERVICES" in shown and "10.96.0.10" in shown and second["diff"] == []
    bulk = {key: value for key, value in first.items() if key not in ("diff", "invocation")}
    assert len(json.dumps(bulk)) < 6000, "the result echoes the rule set"

    default, check, absent, again = node.play(
        {MODULE: {key: value for key, value in SERVE.items() if key != "mode"}, "check_mode": True},
        {MODULE: {"state": "absent"}, "check_mode": True},
        {MODULE: {"state": "absent"}},
        {MODULE: {"state": "absent"}},
    )
    # The default mode will change, which does not matter where everything is removed.
    assert default["mode"] == "iptables" and not default["changed"]
    lines = [" ".join(found.get("warnings", ())) for found in (first, default, absent)]
    assert ["mode: is not set" in line for line in lines] == [False, True, False]
    assert check["changed"] and absent["changed"] and not again["changed"], (check, absent, again)
    assert check["counts"]["removed"] == absent["counts"]["removed"] > 50
    left = [line for line in rules(node).splitlines() if "KUBE-" in line]
    assert left == []
    after = rules(node)
    # Of the kernel parameters only this one is restored: without the rules it would be a security hole.
    assert "route_localnet = 0" in untouched and "route_localnet = 1" in runs.after
    for line in untouched.splitlines():
        assert line in after, line


def test_diff_is_capped_and_variant_is_the_one_in_use(node):
    node.run("iptables-legacy", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
    packed = node.scratch / "packed.json.gz"
    packed.write_bytes(gzip.compress(SNAPSHOT.read_bytes()))
    short, done, again = node.play(
        {MODULE: {**SERVE, "snapshot": str(packed), "diff_lines": 4}, "check_mode": True},
        {MODULE: {**SERVE, "snapshot": str(packed), "diff_lines": 0}},
        {MODULE: {**SERVE, "snapshot": str(SNAPSHOT)}},
    )
    assert all(len(entry["after"].splitlines()) <= 5 for entry in short["diff"])
    assert any("omitted" in entry["after"] for entry in short["diff"])
    assert not any("omitted" in entry["after"] for entry in done["diff"])
    assert "(legacy" in done["variant"] and not again["changed"]
    assert "KUBE-SERVICES" in node.run("iptables-legacy-save").stdout
    assert "KUBE-SERVICES" not in node.run("iptables-nft-save").stdout


def test_a_run_without_a_change_ends_early(node):
    serve = {MODULE: {**SERVE, "mode": "nftables"}, "diff": False}
    flush = {"ansible.builtin.command": {"argv": ["nft", "flush", "chain", "ip", "kube-proxy", "services"]}}
    first, early, _flushed, repaired, again, shown = node.play(
        serve, serve, flush, serve, serve, {**serve, "diff": True}
    )
    assert first["changed"] and first["observed"], first
    assert not early["changed"] and not early["observed"], early
    assert repaired["changed"] and repaired["observed"] and not again["observed"]
    assert shown["observed"] and not shown["changed"]
    for name in set(shown).difference(("durations", "observed", "diff", "invocation")):
        assert again[name] == shown[name], name
    record = "/run/kubenode-proxy/unchanged.json"
    assert node.run("stat", "-c", "%a %u", record).stdout.split() == ["600", "0"]
    node.play({MODULE: {"state": "absent"}})
    assert record not in node.run("find", "/run", "-type", "f").stdout


def test_info_counts_and_finds_drift(node):
    empty, missing = node.play({INFO: {}}, {INFO: SERVE})
    assert empty["programmed"] == {} and "drift" not in empty and "changes" not in empty
    assert missing["drift"] is True and missing["changed"] is False and missing["counts"]["added"] > 50
    history = {"history_directory": "/run/test-history"}
    done, same = node.play({MODULE: {**SERVE, **history}}, {INFO: {**SERVE, **history}})
    assert [item["number"] for item in same["states"]] == [done["saved_state"]], same
    assert "states" not in missing
    assert same["drift"] is False and same["changes"] == [] and sum(same["programmed"].values()) > 50
    before = rules(node)
    node.run("iptables", "-t", "nat", "-A", "KUBE-SERVICES", "-d", "192.0.2.77", "-j", "ACCEPT")
    drifted, alone, repaired, after = node.play({INFO: SERVE}, {INFO: {}}, {MODULE: SERVE}, {INFO: SERVE})
    assert drifted["summary"].endswith(": 1 different (nat KUBE-SERVICES)") and same["summary"] == ""
    assert drifted["drift"] and drifted["counts"]["replaced"] == 1, drifted["changes"]
    assert drifted["changes"][0]["entries"] == ["nat KUBE-SERVICES"] and not drifted["changes"][0]["truncated"]
    assert "192.0.2.77" in "".join(entry["before"] for entry in drifted["diff"])
    assert len(json.dumps({key: drifted[key] for key in drifted if key not in ("diff", "invocation")})) < 5000
    assert sum(alone["programmed"].values()) > 50
    assert repaired["changed"] and not after["drift"]
    assert rules(node) == before


def test_invalid_objects_are_skipped_by_name_and_the_others_served(node):
    hostile = 'cart"\n-A INPUT -j DROP'
    objects = [
        service("good", [{"port": 80, "protocol": "TCP"}]),
        slice_of("good", ["10.244.1.7"], 8080),
        service("port", [{"port": 70000, "protocol": "TCP"}], clusterIP="10.96.0.51"),
        service("address", [{"port": 80}], clusterIP="10.96.0.999"),
        service(hostile, [{"port": 80}], clusterIP="10.96.0.52"),
        service("twice", [{"name": "a", "port": 80}, {"name": "a", "port": 81}], clusterIP="10.96.0.53"),
        {**slice_of("family", ["fd00::1"], 80), "addressType": "IPv4"},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "empty", "namespace": "shop"}},
    ]
    options = {"cluster_state": objects, "mode": "iptables", "outside_host": True}
    (found,) = node.play({MODULE: options})
    assert found["changed"] and not found.get("failed"), found
    named = {(entry["kind"], entry["name"]): entry for entry in found["refused"]}
    assert (
        named[("Service", "port")]["field"] == "spec.ports[0].port" and "70000" in named[("Service", "port")]["reason"]
    )
    for kind, name in (
        ("Service", "address"),
        ("Service", "twice"),
        ("Service", hostile),
    ):
        assert named[(kind, name)]["reason"], name
    assert found["refused_count"] == len(found["refused"]) >= 4
    # Not under Ansible's own key, which would make the task count as skipped.
    assert "skipped" not in found
    (part,) = found["refused_parts"]
    assert (part["name"], part["field"]) == ("family-1", "endpoints[0].addresses[0]") and found[
        "refused_parts_count"
    ] == 1
    assert any("skipped" in warning and "\n" not in warning for warning in found["warnings"])
    text = rules(node)
    assert "10.96.0.50/32" in text and "10.244.1.7:8080" in text
    for absent in ("10.96.0.51", "10.96.0.52", "10.96.0.53", "-A INPUT -j DROP", "fd00::1"):
        assert absent not in text


def test_every_error_is_one_line_and_changes_nothing(node):
    truncated = node.scratch / "truncated.json.gz"
    truncated.write_bytes(gzip.compress(SNAPSHOT.read_bytes())[:900])
    half = node.scratch / "half.json"
    half.write_text(SNAPSHOT.read_text(encoding="utf-8")[:5000], encoding="utf-8")
    kubeconfig = node.scratch / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            }
        ),
        encoding="utf-8",
    )
    bare = {key: value for key, value in SERVE.items() if key != "snapshot"}
    readable = {**bare, "cluster_state": []}
    cases = [
        ({**SERVE, "snapshot": str(truncated)}, "snapshot", "truncated"),
        ({**SERVE, "snapshot": str(half)}, "snapshot", "truncated"),
        ({**SERVE, "snapshot": "/nonexistent/cluster.json"}, "snapshot", "/nonexistent/cluster.json: No such file"),
        (bare, "configuration", "no source of the cluster state"),
        ({**bare, "kubeconfig": str(kubeconfig)}, "api", "127.0.0.1:9"),
        ({**bare, "kubeconfig": "/nonexistent/kubeconfig"}, None, "/nonexistent/kubeconfig"),
        ({**SERVE, "configuration": {"clusterCIDR": "10.0.0.0/99"}}, "configuration", "clusterCIDR"),
        ({**SERVE, "configuration": {"iptables": {"masqueradeBit": 77}}}, "configuration", "masqueradeBit"),
        ({"snapshot": str(SNAPSHOT), "config": "/nonexistent/config"}, "configuration", "/nonexistent/config"),
        ({**SERVE, "config": "/nonexistent/config"}, None, "mutually exclusive"),
        ({**SERVE, "cluster_state": []}, None, "mutually exclusive"),
        ({**SERVE, "kubeconfig": str(kubeconfig)}, None, "mutually exclusive"),
    ]
    tasks = [{MODULE: options} for options, _kind, _words in cases]
    before = rules(node)
    found = node.play(*tasks, {MODULE: readable, **UNPRIVILEGED})
    for (options, kind, words), result in zip([*cases, (readable, "preflight", "root")], found):
        assert result["failed"], (options, result)
        assert words in result["msg"] and "\n" not in result["msg"].strip(), result["msg"]
        if kind:
            assert result["error_kind"] == kind, result
    assert rules(node) == before


def has_ipvs(node):
    """Return whether this kernel can do IPVS, by the programs that load modules and not by the engine."""
    return node.run("sh", "-c", "modprobe -q ip_vs; test -e /proc/net/ip_vs", check=False).returncode == 0


def test_ipvs_mode_without_kernel_support(node):
    wanted = {**SERVE, "mode": "ipvs"}
    before = rules(node)
    if has_ipvs(node):
        (found,) = node.play({MODULE: wanted, "check_mode": True})
        assert found["mode"] == "ipvs"
        return
    plain, again = node.play({MODULE: wanted}, {MODULE: {**SERVE, "mode": "auto"}, "check_mode": True})
    assert plain["failed"] and plain["error_kind"] == "preflight", plain
    assert "ip_vs" in plain["msg"] and "\n" not in plain["msg"]
    assert rules(node) == before
    assert again["mode"] in ("iptables", "nftables") and again["mode_reason"].startswith("auto: ")
    fallen, second = node.play(
        {MODULE: {**wanted, "fallback": "iptables"}}, {MODULE: {**wanted, "fallback": "iptables"}}
    )
    assert fallen["changed"] and fallen["mode"] == "iptables" and not second["changed"]
    assert any("iptables" in warning and "ip_vs" in warning for warning in fallen["warnings"]), fallen
    assert "-A KUBE-SERVICES" in rules(node)


@pytest.fixture
def public_snapshot():
    """Yield the path of a snapshot that every user can read; pytest closes its directories at each start."""
    with tempfile.TemporaryDirectory(prefix="knp-public-") as directory:
        path = Path(directory, "cluster.json")
        path.write_bytes(SNAPSHOT.read_bytes())
        path.chmod(0o644)
        path.parent.chmod(0o755)
        yield path


def test_rendered_needs_no_node_and_is_accepted_by_iptables(node, public_snapshot):
    before = rules(node)
    options = {**SERVE, "state": "rendered", "node_addresses": ["172.30.0.11"]}
    nameless = {key: value for key, value in options.items() if key != "node_name"}
    iptables, ipvs, unprivileged, no_name, no_mode = node.play(
        {MODULE: options},
        {MODULE: {**options, "mode": "ipvs"}},
        {MODULE: {**options, "snapshot": str(public_snapshot)}, **UNPRIVILEGED},
        {MODULE: nameless},
        {MODULE: {**options, "mode": "auto"}},
    )
    assert not iptables["changed"] and rules(node) == before
    assert unprivileged.get("rendered") == iptables["rendered"], unprivileged
    assert no_name["failed"] and no_name["msg"].startswith("node_name: "), no_name
    assert no_mode["failed"] and "auto" in no_mode["msg"], no_mode
    texts = iptables["rendered"]
    assert sorted(texts) == ["ip6tables-restore", "iptables-restore"]
    assert "10.96.0.10/32" in texts["iptables-restore"]
    for program, text in texts.items():
        node.run(program, "--test", text=text)
    assert "-A -t 10.96.0.10:53" in ipvs["rendered"]["ipvsadm IPv4"]
    assert "-A -t 172.30.0.11:30080" in ipvs["rendered"]["ipvsadm IPv4"]
    assert "create KUBE-CLUSTER-IP" in ipvs["rendered"]["ipset IPv4"]


def test_static_services_are_previewed_served_and_removed(node):
    directory = node.scratch / "services.d"
    directory.mkdir()
    static = [service("door", [{"port": 443}], clusterIP="10.103.97.2"), slice_of("door", ["192.0.2.11"], 6443)]
    for item in static:
        del item["metadata"]["namespace"]
    bad = {**static[0], "metadata": {"name": "bad"}, "spec": {**static[0]["spec"], "clusterIP": "10.0.0.300"}}
    (directory / "own.json").write_text(json.dumps(service("own", [{"port": 80}], clusterIP="10.103.97.3")))
    options = {**SERVE, "diff_lines": 0, "node_configuration": {"staticServices": {"directory": str(directory)}}}
    first, preview, served, again, removed, text = node.play(
        {MODULE: options},
        {MODULE: {**options, "static_services": static}, "check_mode": True},
        {MODULE: {**options, "static_services": [*static, bad]}},
        {INFO: {**options, "static_services": static}},
        {MODULE: options},
        {MODULE: {**options, "state": "rendered", "node_addresses": ["192.0.2.1"], "static_services": static}},
    )
    assert "10.103.97.3" in str(first["diff"]) and "10.103.97.2" not in str(first["diff"])
    assert "+-t nat" in str(preview["changes"]) or "10.103.97.2" in str(preview["diff"])
    assert preview["diff"] == served["diff"] and "--to-destination 192.0.2.11:6443" in str(served["diff"])
    (line,) = served["refused"]
    assert line["source"] == f"{directory}/ansible.json"
    assert (line["namespace"], line["name"], line["field"]) == ("static", "bad", "spec.clusterIP")
    assert again["drift"] is False and removed["changed"]
    rules = node.run("sh", "-c", "iptables-nft-save; iptables-legacy-save").stdout
    assert "10.103.97.3" in rules and "10.103.97.2" not in rules
    assert "10.103.97.2" in str(text["rendered"]) and "10.103.97.3" not in str(text["rendered"])
