# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The configuration file that the role agent writes: its variables, and that the engine loads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load_file
from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.archive import pack
from tests.conftest import ROOT

KUBE_PROXY = {"mode": "nftables", "clientConnection": {"qps": 5}}
NODE = {"nodePortRange": "30000-31000"}
FILE = (
    "mode: ipvs\n---\napiVersion: kubenode.proxy/v1alpha1\nkind: NodeProxyConfiguration\nipvsFilterBackend: iptables\n"
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Provide the engine as it is on a host, where it checks the file."""
    path = tmp_path_factory.mktemp("archive") / "kubenode-proxy.pyz"
    path.write_bytes(pack(str(ROOT / "plugins/module_utils")).content)
    return path


def written(directory: Path, archive: Path, variables):
    """Return the documents of the file that the role's own task writes with these variables."""
    defaults = {
        "agent_configuration": {},
        "agent_configuration_file": "",
        "agent_node_configuration": {},
        "agent_node_name": "n1",
        "agent_static": [],
        "role_path": str(ROOT / "roles/agent"),
        "agent_user": "root",
        "agent_python": sys.executable,
        "ansible_python_interpreter": sys.executable,
        # Facts take precedence over the role's own variables.
        "__agent_settings": str(directory / "etc"),
        "__agent_archive": str(archive),
    }
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [str(ROOT / "roles/agent/vars/main.yml")],
        "tasks": [{"ansible.builtin.include_tasks": str(ROOT / "roles/agent/tasks/configure.yml")}],
        "handlers": [{"name": "Reload the agent", "ansible.builtin.meta": "noop"}],
    }
    (directory / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    (directory / "variables.yml").write_text(json.dumps({**defaults, **variables}), encoding="utf-8")
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-e", "@variables.yml", "play.yml"]
    environment = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(directory), "ANSIBLE_HOME": str(directory)}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode:
        return done.stdout + done.stderr
    path = directory / "etc" / "config.yaml"
    load_file(str(path))
    first, *rest = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    assert first["kind"] == "KubeProxyConfiguration" and first["hostnameOverride"] == "n1"
    assert first["clientConnection"]["kubeconfig"] == f"{directory}/etc/kubeconfig"
    assert [item["kind"] for item in rest] in ([], ["NodeProxyConfiguration"])
    heads = ("apiVersion", "kind")
    return first["mode"], *({name: item[name] for name in item if name not in heads} for item in rest)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"agent_configuration": KUBE_PROXY}, ("nftables",)),
        ({"agent_configuration": KUBE_PROXY, "agent_node_configuration": NODE}, ("nftables", NODE)),
        ({"agent_configuration_file": "in.yaml"}, ("ipvs", {"ipvsFilterBackend": "iptables"})),
        (
            {"agent_configuration_file": "in.yaml", "agent_node_configuration": NODE},
            ("ipvs", {"ipvsFilterBackend": "iptables", **NODE}),
        ),
        (
            {"service_proxy_configuration": KUBE_PROXY, "service_proxy_node_configuration": NODE},
            ("nftables", NODE),
        ),
        (
            {
                "agent_configuration": KUBE_PROXY,
                "agent_node_configuration": {**NODE, "apiServers": {"discover": False}},
                "service_proxy_api_servers": ["192.0.2.11", "192.0.2.12:6444", "fd00::1", "[fd00::2]:6444"],
                "service_proxy_api_port": 7443,
            },
            (
                "nftables",
                {
                    **NODE,
                    "apiServers": {
                        "discover": False,
                        "servers": ["192.0.2.11:7443", "192.0.2.12:6444", "[fd00::1]:7443", "[fd00::2]:6444"],
                    },
                },
            ),
        ),
        (
            {
                "agent_configuration": KUBE_PROXY,
                "service_proxy_node_configuration": {"outsideHost": {"labelled": True}},
                "service_proxy_outside_host": True,
            },
            ("nftables", {"outsideHost": {"enabled": True, "labelled": True}}),
        ),
    ],
)
def test_the_documents_come_from_the_variables_or_the_file(tmp_path, archive, variables, expected):
    (tmp_path / "in.yaml").write_text(FILE, encoding="utf-8")
    if "agent_configuration_file" in variables:
        variables = {**variables, "agent_configuration_file": str(tmp_path / "in.yaml")}
    assert written(tmp_path, archive, variables) == expected


def test_a_file_that_the_engine_refuses_is_not_written(tmp_path, archive):
    assert written(tmp_path, archive, {"agent_configuration": KUBE_PROXY}) == ("nftables",)
    before = (tmp_path / "etc/config.yaml").read_bytes()
    for variables, reason in (
        ({"agent_node_configuration": {"healthChecks": {"maximum": 500}}}, "500 is not between 0 and 200"),
        ({"agent_configuration": {"mode": "carrier-pigeon"}}, "KubeProxyConfiguration: mode: "),
    ):
        output = written(tmp_path, archive, variables)
        assert "the agent refuses the new configuration, and the previous one is kept: " in output and reason in output
        assert (tmp_path / "etc/config.yaml").read_bytes() == before


STATIC = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "apiserver", "annotations": {"kubenode.proxy/mode": "userspace"}},
    "spec": {"clusterIP": "10.103.97.2", "ports": [{"port": 443}]},
}


def test_the_agent_may_listen_where_services_need_it(tmp_path):
    api = {"service_proxy_api_servers": ["192.0.2.11"], "service_proxy_api_address": "10.103.97.2"}
    cases = [
        ({"agent_configuration": {"mode": "nftables"}}, False),
        ({"agent_configuration": {"mode": "userspace"}}, True),
        (api, False),
        ({**api, "service_proxy_api_mode": "userspace"}, True),
        ({"service_proxy_static": [STATIC]}, True),
        ({"agent_static": [STATIC]}, True),
    ]
    common = {
        "agent_configuration": {},
        "agent_configuration_file": "",
        "agent_node_configuration": {},
        "agent_node_name": "n1",
        "agent_static": [],
        "agent_user": "kubenode-proxy",
        "agent_load_modules": False,
    }
    tasks = [
        {
            "ansible.builtin.template": {
                "src": str(ROOT / "roles/agent/templates/hardening.j2"),
                "dest": str(tmp_path / f"{number}.conf"),
            },
            "vars": {**common, **variables},
        }
        for number, (variables, _forwards) in enumerate(cases)
    ]
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [str(ROOT / "roles/agent/vars/main.yml")],
        "vars": {"role_path": str(ROOT / "roles/agent"), "ansible_python_interpreter": sys.executable},
        "tasks": tasks,
    }
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "play.yml"]
    environment = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(tmp_path), "ANSIBLE_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for number, (_variables, forwards) in enumerate(cases):
        assert ("CAP_NET_BIND_SERVICE" in (tmp_path / f"{number}.conf").read_text(encoding="utf-8")) is forwards, number
