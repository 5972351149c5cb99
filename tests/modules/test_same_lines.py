# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is wrong with the input is said in the same words by every state of the module and every command."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import pytest

from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.lab import manifests
from tests.lab.ansible_playbook import ansible_playbook
from tests.lab.background import Background
from tests.modules.harness import ROOT, Node

COMMAND = [sys.executable, "-m", "ansible_collections.kubenode.proxy.plugins.module_utils.command.cli"]
PORT = manifests.port(80)
NODE = {
    "kind": "Node",
    "metadata": {"name": "node-a"},
    "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
}


def web(**more: Any) -> list[dict[str, Any]]:
    """Return a Service with one endpoint."""
    annotations, protocol = more.pop("annotations", {}), more.pop("protocol", "TCP")
    port = {**PORT, "protocol": protocol}
    service = manifests.service("web", "10.96.0.10", [port], **more)
    service["metadata"]["annotations"] = annotations
    return [service, manifests.endpoint_slice("web", [manifests.endpoint("10.244.0.9", "node-a")], [port])]


def listed(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": list(items), **fields}


ENDPOINTS = {"apiVersion": "v1", "kind": "Endpoints", "metadata": {"namespace": "default", "name": "web"}}
STATUS = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": "Unauthorized", "code": 401}


class Input(NamedTuple):
    """A snapshot, part of the line about it, and which ways to use it only warn: none, those of rendering, or all."""

    snapshot: dict[str, Any]
    line: str
    warns: str = ""


INPUTS = {
    "endpoints without slices": Input(
        listed(web()[0], ENDPOINTS, NODE), "the cluster state has no EndpointSlice, so it is not that of", "rendering"
    ),
    "nothing": Input(listed(), "the cluster state has no Service and no EndpointSlice and no Node", "rendering"),
    "no such node": Input(
        listed(*web(), {**NODE, "metadata": {"name": "other"}}), "no Node is named node-a", "rendering"
    ),
    "failed request": Input(STATUS, "the answer to a request that failed (kind Status): Unauthorized"),
    "table": Input({"kind": "Table", "apiVersion": "meta.k8s.io/v1", "rows": []}, "a table for people (kind Table)"),
    "another file": Input({"kind": "Config", "apiVersion": "v1", "clusters": []}, "but kind Config"),
    "one page": Input(listed(*web(), NODE, metadata={"continue": "abc"}), "holds a part of a List only"),
    "annotation": Input(
        listed(*web(annotations={"kubenode.proxy/scheduler": "wlc"}), NODE), "Service default/web (80/TCP): ", "all"
    ),
    "invalid annotation": Input(
        listed(*web(annotations={"kubenode.proxy/scheduler": "nope"}), NODE), "default/web: metadata.annot", "all"
    ),
}


def played(node: Node, playbook: str, *options: str, **variables: Any) -> list[str]:
    """Run a playbook on the node, whose name is that of its Node, and return its errors and warnings."""
    given = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3", "ansible_become": False}
    given.update(service_proxy_node_name="node-a", kernel_install_packages=False, kernel_unchangeable="warn")
    hosts = node.scratch / "hosts.json"
    hosts.write_text(json.dumps({"k8s_cluster": {"hosts": {"node": {**given, **variables}}}}))
    words = [*ansible_playbook(), "-i", str(hosts), *options, f"kubenode.proxy.{playbook}"]
    # Ansible breaks warnings where a line of the terminal ends.
    done = node.run("env", "COLUMNS=10000", *words, check=False)
    errors = re.findall(r"^fatal: .*FAILED! => (.*)", done.stdout, re.MULTILINE)
    warnings = re.findall(r"^\[WARNING\]: (.*)", done.stdout + done.stderr, re.MULTILINE)
    return [json.loads(error)["msg"] for error in errors] + warnings


#: The others take the same ways.
IN_FULL = ("nothing", "no such node", "table", "another file", "one page", "invalid annotation")


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        *(pytest.param(name, False, marks=[pytest.mark.full] if name in IN_FULL else []) for name in INPUTS),
        *(pytest.param(name, True, marks=pytest.mark.full, id=f"{name}, roles") for name in INPUTS),
    ],
)
def test_what_is_wrong_with_the_input_is_said_in_the_same_words(node, tmp_path, name, roles):
    given = INPUTS[name]
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(given.snapshot))
    said: dict[str, Any] = {}
    arguments = {"snapshot": str(path), "node_name": "node-a", "mode": "nftables"}
    ways = {"check": ({}, True), "present": ({}, False), "rendered": ({"state": "rendered"}, False)}
    runs = [("service_proxy", {**arguments, **more}, check) for more, check in ways.values()]
    runs.append(("service_proxy_info", arguments, False))
    found = json.loads(node.run(sys.executable, "-m", "tests.modules.many_runs", text=json.dumps(runs)).stdout)
    for way, result in zip([*ways, "info"], found):
        warned = [item["event"]["msg"] if isinstance(item, dict) else item for item in result.get("warnings", ())]
        said[way] = [*([result["msg"]] if result.get("failed") else []), *warned]
        expected = not given.warns or (given.warns == "rendering" and way != "rendered")
        assert bool(result.get("failed")) is expected, (way, result)
    options = ["--snapshot", str(path), "--node-name", "node-a", "--mode", "nftables"]
    commands = {"converge": ["converge", "--check"], "diff": ["diff"]}
    if given.warns != "all":
        # These two show what is served, and no warnings about parts of a Service.
        commands.update(status=["status"], explain=["explain", "default/web"])
    for command, words in commands.items():
        done = node.run("env", "PYTHONPATH=collections", *COMMAND, *words, *options, check=False)
        said[command] = f"{done.stdout}{done.stderr}".splitlines()
    if roles:
        given_file = {"service_proxy_snapshot": str(path), "service_proxy_mode": "nftables"}
        said["role"] = played(node, "converge", "--check", **given_file)
        if given.warns != "all":
            said["comparison"] = played(node, "verify", **given_file)
    same_line(said, given.line)


def same_line(said: dict[str, list[str]], part: str) -> None:
    """Check that each way says one and the same line with this part; commands put the program's name before it."""
    lines = {}
    for way, texts in said.items():
        own = [text[text.index(part) :].rstrip('"') for text in texts if part in text]
        assert own, (way, texts)
        lines[way] = own[0]
    assert len(set(lines.values())) == 1, lines


HEADER = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
NODE_PROXY = "---\napiVersion: kubenode.proxy/v1alpha1\nkind: NodeProxyConfiguration\n"
#: Files with the configuration, and part of the line about each.
CONFIGURATIONS = {
    "missing": ("", "configuration.yaml: "),
    "kind": ("kind: ConfigMap\napiVersion: v1\n", 'kind: "ConfigMap" is not KubeProxyConfiguration'),
    "syntax": (f"{HEADER}mode: [nftables\n", "KubeProxyConfiguration: not valid YAML: "),
    "mode": (f"{HEADER}mode: iptabels\n", "KubeProxyConfiguration: mode: "),
    "range": (f"{HEADER}mode: nftables\nclusterCIDR: 10.0.0.0/99\n", "KubeProxyConfiguration: clusterCIDR[0]: "),
    "type": (f"{HEADER}mode: nftables\noomScoreAdj: much\n", "KubeProxyConfiguration: oomScoreAdj: "),
    "misspelt": (f"{HEADER}mode: nftables\nclusterCidr: 10.0.0.0/8\n", "clusterCidr"),
    "misspelt field of the node": (f"{HEADER}mode: nftables\n{NODE_PROXY}networkPolicies: {{}}\n", "networkPolicies"),
    "number of the node": (
        f"{HEADER}mode: nftables\n{NODE_PROXY}healthChecks: {{maximum: -1}}\n",
        "healthChecks.maximum: ",
    ),
}


@contextlib.contextmanager
def agent(node: Node, path: Path) -> Iterator[list[str]]:
    """Have an agent run on the node, to which no API server answers; yield the options with which it is asked."""
    scratch = node.scratch
    path.write_text(f"{HEADER}mode: nftables\n{NODE_PROXY}staticServices: {{directory: {scratch}/none}}\n")
    authority = make_certificates(scratch / "tls").authority
    kubeconfig = write_kubeconfig(scratch / "kubeconfig", "https://127.0.0.1:1", authority, "token")
    control = ["--control", str(scratch / "agent.sock")]
    words = ["run", "--config", str(path), "--kubeconfig", str(kubeconfig), "--node-name", "node-a", *control]
    words += ["--state-directory", str(scratch / "run"), "--cache", str(scratch / "cache")]
    words += ["--drain-file", str(scratch / "drain")]
    command = [*node.enter(ROOT), "env", "PYTHONPATH=collections", *COMMAND, *words]
    with Background(command, ready=lambda _process: (scratch / "agent.sock").exists(), log=scratch / "log"):
        yield control


@pytest.mark.parametrize(
    "name",
    [name if name == "mode" else pytest.param(name, marks=pytest.mark.full) for name in CONFIGURATIONS],
)
def test_what_is_wrong_with_the_configuration_is_said_in_the_same_words(node, tmp_path, name):
    """By the start of the agent, the check before that, its reload, and commands; a warning by all of them as well."""
    text, line = CONFIGURATIONS[name]
    path = tmp_path / "configuration.yaml"
    said: dict[str, str] = {}
    with agent(node, path) as control:
        path.unlink()
        if text:
            path.write_text(text)
        reloaded = node.run("env", "PYTHONPATH=collections", *COMMAND, "reload", *control, check=False)
        assert reloaded.returncode == 1
        said["reload"] = reloaded.stderr
        said["log of the agent"] = (node.scratch / "log").read_text().replace('\\"', '"')
    snapshot = tmp_path / "snapshot.json"
    snapshot.write_text(json.dumps(listed(*web(), NODE)))
    options = ["--config", str(path), "--snapshot", str(snapshot), "--node-name", "node-a"]
    kept = [
        "--state-directory",
        str(tmp_path / "run"),
        "--control",
        str(tmp_path / "sock"),
        "--cache",
        str(tmp_path / "c"),
    ]
    kubeconfig = ["--kubeconfig", str(tmp_path / "none"), "--drain-file", str(tmp_path / "drain")]
    ways = {
        "check-configuration": ["check-configuration", str(path)],
        "run": ["run", "--config", str(path), *kept, *kubeconfig],
        "converge": ["converge", "--check", *options],
        "diff": ["diff", *options],
        "status": ["status", *options],
        "explain": ["explain", "default/web", *options],
    }
    for way, words in ways.items():
        done = node.run("env", "PYTHONPATH=collections", "timeout", "15", *COMMAND, *words, check=False)
        said[way] = f"{done.stdout}{done.stderr}"
    same_line({way: given.splitlines() for way, given in said.items()}, line)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name != "missing"])
def test_roles_say_what_is_wrong_with_the_configuration_before_they_change_anything(node, tmp_path, name):
    text, line = CONFIGURATIONS[name]
    path, snapshot = tmp_path / "configuration.yaml", tmp_path / "snapshot.json"
    path.write_text(text)
    snapshot.write_text(json.dumps(listed(*web(), NODE)))
    kubeconfig = tmp_path / "kubeconfig"
    cluster = {"name": "a", "cluster": {"server": "http://192.0.2.1:6443"}}
    context = {"name": "a", "context": {"cluster": "a"}}
    kubeconfig.write_text(json.dumps({"current-context": "a", "contexts": [context], "clusters": [cluster]}))
    checked = node.run("env", "PYTHONPATH=collections", *COMMAND, "check-configuration", str(path), check=False)
    said = {"check-configuration": checked.stderr.splitlines()}
    given = {"agent_configuration_file": str(path), "service_proxy_snapshot": str(snapshot)}
    for playbook in ("converge", "verify", "agent"):
        said[playbook] = played(node, playbook, **given, agent_kubeconfig=str(kubeconfig))
    same_line(said, line)
    left = "/etc/kubenode-proxy /etc/modules-load.d /etc/sysctl.d /usr/local/lib/kubenode-proxy /var/lib/kubenode-proxy"
    assert node.run("sh", "-c", f"find {left} -type f 2>/dev/null", check=False).stdout == ""
