# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The second document of the configuration file, a NodeProxyConfiguration: where it is read, and what is refused."""

from __future__ import annotations

import json

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load, load_file
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import KubeProxyConfiguration
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import NodeProxyConfiguration

FIRST = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\n"
SECOND = "apiVersion: kubenode.proxy/v1alpha1\nkind: NodeProxyConfiguration\n"


def problem(text, **more):
    with pytest.raises(ConfigurationError) as caught:
        load(text, **more)
    return str(caught.value)


@pytest.mark.parametrize("text", [FIRST, f"{FIRST}---\n", f"{FIRST}---\n{SECOND}", f"---\n{SECOND}---\n{FIRST}"])
def test_the_document_may_be_absent_first_or_second(text):
    configuration, warnings = load(text)
    assert configuration == KubeProxyConfiguration(mode="ipvs") and warnings == ()
    assert configuration.node_proxy == NodeProxyConfiguration()


def test_json_objects_can_be_two_documents_too():
    text = "\n---\n".join(json.dumps(yaml.safe_load(part)) for part in (FIRST, SECOND))
    assert load(text) == (KubeProxyConfiguration(mode="ipvs"), ())


def test_kube_proxy_finds_its_document_first():
    # kube-proxy decodes the first document of the file, as any reader of a single document does.
    assert next(yaml.safe_load_all(f"{FIRST}---\n{SECOND}"))["kind"] == "KubeProxyConfiguration"


def test_unknown_fields_are_named_with_their_document():
    assert load(f"{FIRST}noSuchField: 1\n---\n{SECOND}nothing: null\n").warnings == (
        'KubeProxyConfiguration: unknown field "noSuchField"',
    )
    # A later kube-proxy may know the one; only this project reads the other.
    assert problem(f"{FIRST}---\n{SECOND}another: 2\n") == 'NodeProxyConfiguration: unknown field "another"'
    assert problem(
        f"{FIRST}---\nkind: NodeProxyConfiguration\napiVersion: kubenode.proxy/v1alpha1\nnetworkpolicy: {{}}\n"
    ) == ('NodeProxyConfiguration: unknown field "networkpolicy"; did you mean networkPolicy?')


def test_a_duplicate_field_is_named():
    (warning,) = load(f"{FIRST}mode: ipvs\n---\n{SECOND}").warnings
    assert warning == 'KubeProxyConfiguration or NodeProxyConfiguration: duplicate field "mode"; the last one counts'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SECOND, "KubeProxyConfiguration: is missing; a file with only a NodeProxyConfiguration is not complete"),
        (
            f"{FIRST}---\n{SECOND}---\n{SECOND}",
            "NodeProxyConfiguration: contains 2 YAML documents instead of one, of kind "
            '"NodeProxyConfiguration", "NodeProxyConfiguration"',
        ),
        (
            f"{FIRST}---\nkind: Service\n",
            "KubeProxyConfiguration: contains 2 YAML documents instead of one, of kind "
            '"KubeProxyConfiguration", "Service"',
        ),
        (
            f"{FIRST}---\nkind: NodeProxyConfiguration\n",
            "NodeProxyConfiguration: apiVersion: is missing; it must be kubenode.proxy/v1alpha1",
        ),
        (
            f"{FIRST}---\n{SECOND.replace('v1alpha1', 'v7')}",
            'NodeProxyConfiguration: apiVersion: "kubenode.proxy/v7" is not kubenode.proxy/v1alpha1',
        ),
        (f"{FIRST}---\n- a list\n", "KubeProxyConfiguration: a list is not an object with fields"),
    ],
)
def test_files_with_other_documents_are_refused(text, reason):
    assert problem(text) == reason


def test_problems_of_both_documents_are_reported_together(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"{FIRST}oomScoreAdj: 5000\n---\n{SECOND}", encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        load_file(str(path), node_source={"kind": "Other"})
    assert str(caught.value) == (
        f"{path}: KubeProxyConfiguration: oomScoreAdj: 5000 is not between -1000 and 1000; "
        'NodeProxyConfiguration: kind: "Other" is not NodeProxyConfiguration'
    )


def test_data_replaces_the_document_of_the_file():
    assert problem(f"{FIRST}---\n{SECOND}", node_source={"apiVersion": "v1"}) == (
        'NodeProxyConfiguration: apiVersion: "v1" is not kubenode.proxy/v1alpha1'
    )
    assert problem({"mode": "ipvs"}, node_source={"unknown": 1}) == 'NodeProxyConfiguration: unknown field "unknown"'


def test_api_servers():
    text = "apiServers: {servers: [192.0.2.1, '192.0.2.1:443', 'fd00:0::1', '[fd00::2]:7443', api.example.com]}"
    settings = load(f"{FIRST}---\n{SECOND}{text}\n").configuration.node_proxy.api_servers
    assert settings.alternatives == (
        ("192.0.2.1", 6443),
        ("192.0.2.1", 443),
        ("fd00::1", 6443),
        ("fd00::2", 7443),
        ("api.example.com", 6443),
    )
    assert settings.discover


@pytest.mark.parametrize(
    "server", ["", "https://192.0.2.1", "192.0.2.1:0", "a b", "192.0.2.1:65536", "[fd00::1]", "-a"]
)
def test_invalid_api_servers(server):
    assert problem(f"{FIRST}---\n{SECOND}apiServers: {{servers: [ok, {json.dumps(server)}]}}\n") == (
        f"NodeProxyConfiguration: apiServers.servers[1]: {json.dumps(server)} is not of the form ADDRESS, NAME, "
        "ADDRESS:PORT or [ADDRESS]:PORT"
    )


def test_outside_host():
    text = "outsideHost: {enabled: true, namespaces: [shop], labelled: true}"
    settings = load(f"{FIRST}---\n{SECOND}{text}\n").configuration.node_proxy.outside_host
    assert settings == (True, ("shop",), True)
    assert problem(f"{FIRST}---\n{SECOND}outsideHost: {{namespaces: [shop, Not]}}\n") == (
        'NodeProxyConfiguration: outsideHost.namespaces[1]: "Not" is not a namespace'
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"annotations": "false"}, 'annotations: "false" is not true or false'),
        ({"annotations": 0}, "annotations: 0 is not true or false"),
        ({"annotations": []}, "annotations: a list is not true or false"),
        ({"namespaces": "shop"}, 'namespaces: "shop" is not a list of strings'),
        ({"namespaces": ["shop", None]}, "namespaces: a list is not a list of strings"),
        ({"namespaces": ["shop", "Shop"]}, 'namespaces[1]: "Shop" is not a namespace'),
        ({"namespaces": [" shop"]}, 'namespaces[0]: " shop" is not a namespace'),
        ({"namespaces": ["\u0661"]}, 'namespaces[0]: "\\u0661" is not a namespace'),
        ({"nodePortSources": ["10.0.0.0/33"]}, 'nodePortSources[0]: "10.0.0.0/33" is not a CIDR'),
        ({"externalRanges": ["::/0", "198.51.100.7"]}, 'externalRanges[1]: "198.51.100.7" is not a CIDR'),
        ({"externalRanges": "10.0.0.0/8"}, 'externalRanges: "10.0.0.0/8" is not a list of strings'),
        ({"nodePortSources": [True]}, "nodePortSources: a list is not a list of strings"),
        (
            {"removedEndpoints": "reset-after=0s"},
            'removedEndpoints: "reset-after=0s" is not keep, reset or reset-after=DURATION, from 1s to 60m',
        ),
        ({"removedEndpoints": 1}, "removedEndpoints: 1 is not a string"),
        ({"nodeWeights": "yes"}, 'nodeWeights: "yes" is not true or false'),
    ],
)
def test_invalid_settings_of_the_policy_of_services(given, line):
    with pytest.raises(ConfigurationError) as caught:
        load({"mode": "nftables"}, node_source={"servicePolicy": given})
    assert str(caught.value) == f"NodeProxyConfiguration: servicePolicy.{line}"


def test_services_that_are_left_to_programs():
    def text(items):
        return f"{FIRST}---\n{SECOND}servicePolicy: {{localServices: [{items}]}}\n"

    assert load(text("kube-system/kube-dns")).configuration.node_proxy.service_policy.local_services == (
        "kube-system/kube-dns",
    )
    for item in ("kube-dns", "a/b/c", "kube-system/", "A/b"):
        assert problem(text(f"a/b, '{item}'")) == (
            f'NodeProxyConfiguration: servicePolicy.localServices[1]: "{item}" is not a Service, NAMESPACE/NAME'
        )


@pytest.mark.parametrize(
    ("text", "health", "metrics"),
    [
        (FIRST, "0.0.0.0:10266", "127.0.0.1:10267"),
        (
            f"{FIRST}healthzBindAddress: 192.0.2.1\nmetricsBindAddress: 0.0.0.0:10249\n",
            "192.0.2.1:10266",
            "0.0.0.0:10249",
        ),
    ],
)
def test_beside_a_kube_proxy_its_ports_are_no_defaults(text, health, metrics):
    configuration = load(f"{text}---\n{SECOND}networkPolicy: {{enabled: true, standalone: true}}\n").configuration
    assert configuration.node_proxy.network_policy.standalone
    assert (configuration.healthz_bind_address, configuration.metrics_bind_address) == (health, metrics)


def test_standalone_policies_need_policies():
    assert "networkPolicy.standalone: needs networkPolicy.enabled" in problem(
        f"{FIRST}---\n{SECOND}networkPolicy: {{standalone: true}}"
    )
