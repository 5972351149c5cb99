# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Mistakes of an operator, and faults of a node: named in one line, before anything is changed."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.lab import manifests
from tests.lab.ansible_playbook import ansible_playbook
from tests.lab.namespaces import ROOT
from tests.modules.harness import unanswered_kubeconfig

BOOT_FILES = "/etc/modules-load.d /etc/sysctl.d"


class Operator:
    """Runs playbooks against the node, which is served from a file."""

    def __init__(self, node):
        self.node = node
        self.snapshot = node.scratch / "cluster.json"
        service = manifests.service("web", "10.96.0.10", [manifests.port(80)])
        items = [manifests.node("node", "192.0.2.1", "10.244.1.0/24"), service]
        items += [manifests.endpoint_slice("web", [manifests.endpoint("10.244.1.2")], [manifests.port(8080)])]
        self.snapshot.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))

    def run(self, playbook="converge", **variables):
        """Run a playbook; return the status and the last error, and check that each error is one short line."""
        inventory = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}
        given = {"service_proxy_snapshot": str(self.snapshot), "kernel_unchangeable": "warn"}
        given = {**inventory, **given, "kernel_install_packages": False, "ansible_become": False, **variables}
        hosts = self.node.scratch / "hosts.yml"
        hosts.write_text(yaml.safe_dump({"k8s_cluster": {"hosts": {"node": given}}}))
        # Without this, Ansible omits sudo where root becomes root.
        environment = ("env", "ANSIBLE_BECOME_ALLOW_SAME_USER=1")
        done = self.node.run(
            *environment, *ansible_playbook(), "-i", str(hosts), f"kubenode.proxy.{playbook}", check=False
        )
        errors = re.findall(r"fatal: \[node(?: -> localhost)?\]: FAILED! => (.*)", done.stdout)
        return done.returncode, json.loads(errors[-1])["msg"] if errors else done.stdout + done.stderr

    def programmed(self):
        """Return what is programmed, and the files for the next boot."""
        return self.node.run("sh", "-c", f"iptables-save | grep KUBE; find {BOOT_FILES} -type f", check=False).stdout


@pytest.fixture
def operator(node):
    return Operator(node)


def test_what_does_not_exist_is_named_before_anything_is_changed(operator):
    missing = "service_proxy_snapshot: /nope on the controller cannot be read: No such file or directory"
    assert operator.run(service_proxy_snapshot="/nope") == (2, missing)
    both = "service_proxy_snapshot and service_proxy_kubeconfig exclude each other: set one of them"
    assert operator.run(service_proxy_kubeconfig="/etc/hosts") == (2, both)
    missing = "service_proxy_kubelet_kubeconfig: /nope cannot be read: No such file or directory"
    servers = {"service_proxy_api_servers": ["192.0.2.7"], "service_proxy_api_address": "198.18.0.1"}
    assert operator.run(service_proxy_kubelet_kubeconfig="/nope", **servers) == (2, missing)
    for playbook, variable, path, reason in (
        ("agent", "agent_cache_directory", "/etc/passwd", "Not a directory"),
        ("agent", "agent_cache_directory", "/proc/libraries", "No such file or directory"),
        ("report", "proxy_report_html", "/nope/report.html", "No such file or directory"),
        ("report", "proxy_report_json", "/etc", "Is a directory"),
    ):
        said = f"{variable}: {path} on the controller cannot be written: {reason}"
        assert operator.run(playbook, **{variable: path}, agent_libraries="wheelhouse") == (2, said)
    relative = "agent_cache_directory: cache is not an absolute path"
    assert operator.run("agent", agent_cache_directory="cache", agent_libraries="wheelhouse") == (2, relative)
    relative = "service_proxy_kubeconfig: admin.conf is not an absolute path"
    alone = "service_proxy_api_servers: needs service_proxy_api_address, at which they are served"
    assert operator.run(service_proxy_api_servers=["192.0.2.9"]) == (2, alone)
    assert operator.run(service_proxy_kubeconfig="admin.conf", service_proxy_snapshot="") == (2, relative)
    status, error = operator.run("verify", ansible_python_interpreter="/usr/bin/nopython")
    assert status and error.startswith("node: the Python of this host cannot run modules: ")
    assert "/usr/bin/nopython: not found; install Python 3.9 or later" in error
    assert operator.programmed() == ""


def test_no_error_shows_a_secret_that_is_given_in_the_wrong_place(operator):
    document = json.dumps({"kind": "Config", "users": [{"name": "a", "user": {"token": "secret"}}]})
    for playbook, variable in (
        ("converge", "service_proxy_kubeconfig"),
        ("agent", "agent_kubeconfig"),
        ("agent", "agent_admin_kubeconfig"),
    ):
        said = f"{variable}: it is a document (which is not shown), and must be the path of one"
        for value in (document, json.loads(document), f"kind: Config\n{document}"):
            given = {variable: value, "service_proxy_snapshot": "", "agent_create_access": "admin" in variable}
            status, error = operator.run(playbook, **given)
            assert status == 2 and said in error and "secret" not in error, error
    status, error = operator.run(service_proxy_api_host="https://me:secret@192.0.2.1", service_proxy_snapshot="")
    assert status == 2 and error == "host: it has a user name, and is shown in errors: use api_key or a kubeconfig"
    assert operator.programmed() == ""


def test_a_host_that_does_not_let_ansible_become_root_is_not_told_to_install_python(operator):
    refused = (
        "node: become: sudo does not run programs as root: sudo: a password is required; check ansible_become_pass"
    )
    by_nobody = "setpriv --reuid=65534 --clear-groups sudo"
    status, error = operator.run(ansible_become=True, ansible_become_exe=by_nobody)
    assert status and error.startswith(refused)
    error = operator.run(ansible_become=True, ansible_become_exe=by_nobody, ansible_become_password="wrong")[1]
    assert error.startswith("node: become: sudo does not run programs as root: ") and "Python" not in error
    needed = "what follows needs root: run the task with become: true (it runs as user id 65534)"
    assert operator.run(ansible_become=True, ansible_become_user="nobody") == (2, needed)
    assert operator.programmed() == ""


def test_an_upgrade_of_the_agent_needs_room_beside_what_is_installed(operator):
    node, directory = operator.node, "/usr/local/lib/kubenode-proxy"
    hide = "mount -t tmpfs none /usr/local/lib"
    fill = f"{hide}; mkdir {directory}; mount -t tmpfs -o size=1m none {directory}; echo 1 >{directory}/VERSION"
    node.run("sh", "-c", f"{fill}; : >{directory}/source.pyz")
    named = f"{directory}/source.pyz cannot be written: No space left on device"
    kubeconfig = unanswered_kubeconfig(node.scratch / "kubeconfig")
    assert operator.run("agent", agent_kubeconfig=kubeconfig) == (2, named)
    assert operator.run("agent", agent_kubeconfig=kubeconfig, proxy_prepare_kernel=False) == (2, named)
    assert operator.programmed() == ""


def test_an_account_that_cannot_be_created_is_named_before_anything_is_changed(operator):
    kubeconfig = unanswered_kubeconfig(operator.node.scratch / "admin.conf")
    given = {"agent_create_access": True, "agent_api_server": "https://192.0.2.9:6443"}
    status, error = operator.run("agent", agent_admin_kubeconfig=kubeconfig, **given)
    assert status and error.startswith("agent_create_access, with agent_admin_kubeconfig or KUBECONFIG: API server ")
    assert "Connection refused" in error and operator.programmed() == ""


def test_files_that_cannot_be_written_are_named_before_anything_is_programmed(operator):
    node, path = operator.node, "/etc/modules-load.d/kubenode-proxy.conf"
    node.run("mount", "-o", "remount,ro", "/etc/modules-load.d")
    assert operator.run() == (2, f"kernel_modules_file: {path} cannot be written: Read-only file system")
    assert operator.programmed() == ""
    node.run("mount", "-o", "remount,rw", "/etc/modules-load.d")
    assert operator.run()[0] == 0 and "KUBE-SERVICES" in operator.programmed()
    # Whether a file that exists must be changed is known too late, but what is done is said, and what is not.
    node.run("sh", "-c", f"echo other >>{path}; mount -o remount,ro /etc/modules-load.d")
    done = "node: served in iptables mode, but the kernel's settings are not kept over a reboot"
    assert operator.run() == (2, f"{done}: {path}: cannot be written: Read-only file system")
    before = operator.programmed()
    assert operator.run("cleanup") == (2, f"{path}: cannot be written: Read-only file system")
    assert operator.programmed() == before
    # A full disk, which Ansible finds after it has copied the file beside its destination.
    directory = "/var/lib/kubenode-proxy"
    fill = f"mount -t tmpfs -o size=16k none {directory}; : >{directory}/snapshot.json.gz; yes >{directory}/fill"
    node.run("sh", "-c", fill, check=False)
    named = f"service_proxy_directory: {directory}/snapshot.json.gz.new cannot be written: No space left on device"
    assert operator.run() == (2, named)


def test_every_variable_that_names_a_file_on_the_controller_is_checked():
    """The variables whose descriptions say so are those that tasks give to role_variables, others excepted."""
    others = ("agent_cache_directory", "agent_libraries")
    checked = "".join((ROOT / "roles" / role / "vars/main.yml").read_text() for role in ("agent", "service_proxy"))
    for path in (ROOT / "roles").glob("*/meta/argument_specs.yml"):
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            for name, option in entry.get("options", {}).items():
                if "on the controller" in str(option["description"]) and name not in others:
                    assert re.search(rf"'/?{name}/?'", checked), name
