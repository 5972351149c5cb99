# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command preflight, and comparisons, beside a process named kube-proxy in a network namespace of both."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.base import installed
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import PreflightError
from ansible_collections.kubenode.proxy.plugins.module_utils.command import preflight_command
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight import processes
from tests.conftest import ROOT
from tests.lab import manifests
from tests.unit.command.node_command import ENDPOINTS, SERVICE

BESIDE = """
$BEFORE bash -c "exec -a kube-proxy sleep 60" &
until grep -q kube-proxy /proc/$!/cmdline; do sleep 0.01; done
"$@"
status=$?
kill $!
exit $status
"""
MODULE = "ansible_collections.kubenode.proxy.plugins.module_utils.command.cli"
ONLY = """\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
---
apiVersion: kubenode.proxy/v1alpha1
kind: NodeProxyConfiguration
networkPolicy: {enabled: true, standalone: true}
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")


def command(*words: str, beside: bool = True, before: str = "") -> subprocess.CompletedProcess[str]:
    start = ["bash", "-c", BESIDE, "bash"] if beside else []
    argv = ["unshare", "--net", *start, sys.executable, "-m", MODULE, *words]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'collections'}:{ROOT}", "BEFORE": before}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


def test_a_running_kube_proxy_is_refused_by_name_and_with_the_remedy() -> None:
    done = command("preflight")
    assert done.returncode == 1 and done.stderr.startswith("kubenode-proxy: kube-proxy runs on this node (process ")
    assert "kubenode.proxy.migrate" in done.stderr and done.stderr.endswith("[kube-proxy]\n")
    alone = command("preflight", beside=False)
    assert (alone.returncode, alone.stdout) == (0, "no other service proxy runs on this node\n"), alone.stderr


@pytest.mark.parametrize("before", ["setpriv --reuid 65534 --clear-groups", "unshare --user --map-root-user"])
def test_a_process_without_rights_is_no_service_proxy(before: str) -> None:
    """Any user of the node could otherwise keep the agent from starting, and each convergence from running."""
    done = command("preflight", before=before)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_is_accepted_where_it_is_meant_to_serve_or_is_ignored(tmp_path) -> None:
    ignored = command("preflight", "--ignore", "kube-proxy")
    assert ignored.returncode == 0 and "ignored: kube-proxy runs" in ignored.stderr
    (tmp_path / "config.yaml").write_text(ONLY)
    only = command("preflight", "--config", str(tmp_path / "config.yaml"))
    assert (only.returncode, only.stderr) == (0, "")


def test_a_comparison_warns_where_a_convergence_is_refused(tmp_path) -> None:
    items = [SERVICE, ENDPOINTS, manifests.node("node1", "192.0.2.1", "10.244.1.0/24")]
    (tmp_path / "snapshot.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    options = ("--snapshot", str(tmp_path / "snapshot.json"), "--node-name", "node1", "--mode", "nftables")
    compared = command("diff", *options)
    assert compared.returncode == 3 and "kubenode-proxy: warning: kube-proxy runs on this node" in compared.stderr
    refused = command("converge", "--check", *options)
    assert refused.returncode == 1 and refused.stderr.startswith("kubenode-proxy: kube-proxy runs on this node")


@pytest.mark.parametrize("text", [ONLY, ""])
def test_a_kube_proxy_that_is_kept_off_is_named_where_it_is_to_serve(tmp_path, monkeypatch, text: str) -> None:
    mark, configuration = tmp_path / "kept-off", tmp_path / "config.yaml"
    configuration.write_text(text or ONLY.partition("---")[0], encoding="utf-8")
    mark.touch()
    monkeypatch.setattr(processes, "KEPT_OFF_FILE", str(mark))
    arguments = argparse.Namespace(config=str(configuration), ignore=[])
    if not text:
        assert preflight_command.check_node(arguments).document == {"findings": []}
        return
    with pytest.raises(
        PreflightError, match=r"^kube-proxy is kept off this node \(/var/lib/.*\), and .* \[kept-off\]$"
    ):
        preflight_command.check_node(arguments)
    arguments.ignore = ["kept-off"]
    assert preflight_command.check_node(arguments).document == {"findings": ["kept-off"]}


def test_roles_and_engine_name_the_same_mark() -> None:
    variables = yaml.safe_load((ROOT / "roles/service_proxy/vars/main.yml").read_text(encoding="utf-8"))
    assert variables["__service_proxy_place_file"] == installed.KEPT_OFF_FILE


def test_the_start_of_an_agent_that_serves_loads_no_configuration(tmp_path, monkeypatch) -> None:
    configuration = tmp_path / "config.yaml"
    configuration.write_text(ONLY.partition("---")[0], encoding="utf-8")
    monkeypatch.setattr(processes, "CONFIGURATION_FILE", str(configuration))
    monkeypatch.setattr(processes, "processes", lambda _root="": [])
    monkeypatch.setattr(preflight_command, "load_given", lambda _path: pytest.fail("the configuration is loaded"))
    arguments = argparse.Namespace(config=str(configuration), ignore=[])
    assert preflight_command.check_node(arguments).document == {"findings": []}
