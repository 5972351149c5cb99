# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The static Service of the API servers that roles create from variables: its endpoints and checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.static import parse_static
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import HealthCheck, NamespacedName
from tests.conftest import ROOT

NAME = NamespacedName("static", "apiserver")
TEMPLATE = ROOT / "roles" / "agent" / "templates" / "api_service.json.j2"
READYZ = HealthCheck(
    "https",
    path="/readyz",
    statuses=((200, 200), (401, 401), (403, 403)),
    ca="/etc/kubernetes/pki/ca.crt",
    fast_interval=0.5,
)


def made(directory: Path, variables):
    """Return the static Services that the template renders with these variables."""
    task = {"ansible.builtin.template": {"src": str(TEMPLATE), "dest": str(directory / "out.json")}}
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [task]}
    (directory / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    (directory / "variables.yml").write_text(
        json.dumps({"ansible_python_interpreter": sys.executable, **variables}), encoding="utf-8"
    )
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-e", "@variables.yml", "play.yml"]
    environment = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(directory), "ANSIBLE_HOME": str(directory)}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return parse_static({"ansible.json": json.loads((directory / "out.json").read_text())})


@pytest.mark.parametrize(
    ("variables", "port", "check", "endpoints"),
    [
        (
            {"service_proxy_api_servers": ["192.0.2.11", "192.0.2.12:7443"]},
            6443,
            READYZ,
            {("192.0.2.11", 6443), ("192.0.2.12", 7443)},
        ),
        (
            {
                "service_proxy_api_servers": ["192.0.2.11", "[2001:db8::1]:8443", "2001:db8::2"],
                "service_proxy_api_port": 443,
                "service_proxy_api_check": {"ca": "", "status": 200, "interval": "2s", "server-name": "kubernetes"},
                "service_proxy_api_mode": "userspace",
            },
            443,
            READYZ._replace(statuses=((200, 200),), ca="", interval=2.0, server_name="kubernetes"),
            {("192.0.2.11", 443), ("2001:db8::1", 8443), ("2001:db8::2", 443)},
        ),
    ],
)
def test_servers_become_checked_endpoints(tmp_path, variables, port, check, endpoints):
    found = made(tmp_path, {"service_proxy_api_address": "10.103.97.2", **variables})
    assert found.refusals == () and list(found.services) == [NAME]
    service = found.services[NAME]
    assert service.policy.userspace is ("service_proxy_api_mode" in variables)
    assert (service.cluster_ip_v4, [item.port for item in service.ports]) == ("10.103.97.2", [port])
    assert service.check == check
    places = {
        (endpoint.address, item.port)
        for part in found.slices[NAME].values()
        for item in part.ports
        for endpoint in part.endpoints
    }
    assert places == endpoints


def test_without_servers_there_is_none_and_without_an_address_it_is_refused(tmp_path):
    assert made(tmp_path, {}).services == {}
    (refusal, *_slices) = made(tmp_path, {"service_proxy_api_servers": ["192.0.2.11"]}).refusals
    assert (refusal.field, refusal.name) == ("spec.clusterIP", "apiserver")
