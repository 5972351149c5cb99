# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is wrong with the input is said in the same words by every state of the module and every command."""

from __future__ import annotations

import json
import sys
from typing import Any, Dict, List, NamedTuple

import pytest

from tests.lab import manifests

COMMAND = [sys.executable, "-m", "ansible_collections.kubenode.proxy.plugins.module_utils.command.cli"]
PORT = manifests.port(80)
NODE = {
    "kind": "Node",
    "metadata": {"name": "node-a"},
    "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
}


def web(**more: Any) -> List[Dict[str, Any]]:
    """Return a Service with one endpoint."""
    annotations, protocol = more.pop("annotations", {}), more.pop("protocol", "TCP")
    port = {**PORT, "protocol": protocol}
    service = manifests.service("web", "10.96.0.10", [port], **more)
    service["metadata"]["annotations"] = annotations
    return [service, manifests.endpoint_slice("web", [manifests.endpoint("10.244.0.9", "node-a")], [port])]


def listed(*items: Dict[str, Any], **fields: Any) -> Dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": list(items), **fields}


ENDPOINTS = {"apiVersion": "v1", "kind": "Endpoints", "metadata": {"namespace": "default", "name": "web"}}
STATUS = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": "Unauthorized", "code": 401}


class Input(NamedTuple):
    """A snapshot, part of the line about it, and which ways to use it only warn: none, those of rendering, or all."""

    snapshot: Dict[str, Any]
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


#: The others take the same ways.
IN_FULL = ("nothing", "no such node", "table", "another file", "one page", "invalid annotation")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in IN_FULL else name for name in INPUTS]
)
def test_what_is_wrong_with_the_input_is_said_in_the_same_words(node, tmp_path, name):
    given = INPUTS[name]
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(given.snapshot))
    said: Dict[str, Any] = {}
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
    lines = {}
    for way, texts in said.items():
        # Commands put the program's name before a line.
        own = [text[text.index(given.line) :] for text in texts if given.line in text]
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


@pytest.mark.parametrize(
    "name",
    [name if name == "mode" else pytest.param(name, marks=pytest.mark.full) for name in CONFIGURATIONS],
)
def test_what_is_wrong_with_the_configuration_is_said_in_the_same_words(node, tmp_path, name):
    """By the start of the agent, the check before that, and commands; a warning by all of them as well."""
    text, line = CONFIGURATIONS[name]
    path = tmp_path / "configuration.yaml"
    if text:
        path.write_text(text)
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
    lines = {}
    for way, words in ways.items():
        done = node.run("env", "PYTHONPATH=collections", "timeout", "15", *COMMAND, *words, check=False)
        said = [each for each in f"{done.stdout}{done.stderr}".splitlines() if line in each]
        assert said, (way, done.stdout, done.stderr)
        lines[way] = said[0][said[0].index(line) :].rstrip('"')
    assert len(set(lines.values())) == 1, lines
