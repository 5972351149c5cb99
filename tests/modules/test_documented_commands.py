# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the commands of README.md, CONTRIBUTING.md and the other pages in a shell, as they are printed.

The shell has its own home directory and a copy of the clone as its working directory. docs/operations.md and README
install what it needs there. ``inventory/nodes.yml`` is the file that README prints; ``~/.kube/config`` names the
tests' API server, whose only Node, worker-1, is a lab node: a network namespace reached over ssh, as an ordinary user
who has sudo.

Three things are not literal. ``kubectl`` and, on the node, ``kubenode-proxy`` are small programs of this test: the
first reads lists from the API server, the second starts the node command from the collection that the shell has
installed. ``NODE`` in a command is replaced by worker-1. The commands that LIMITED lists are checked, but not run;
those in ``NOT_RUN`` of tests/documentation/commands.py are not run here, each for the reason that is written there.

The pages are run in order: README.md installs what the others use.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.documentation.commands import (
    command_blocks,
    installation_of_ansible,
    inventory_of_readme,
    pages_with_commands,
    playbook_blocks,
)
from tests.documentation.shell import Shell, copy_clone
from tests.lab.cluster import SNAPSHOT, Lab
from tests.lab.node import USER
from tests.modules.harness import ROOT

_SYNTAX = 'ansible-playbook() { command ansible-playbook "$@" --syntax-check; }'
_HELP = 'kubenode-proxy() { command kubenode-proxy "$@" --help >/dev/null; }'
_REACHED = 'ansible-playbook() { command ansible-playbook "$@" -e verify_services=shop/payments; }'
_TARGETS = 'make() { command make --dry-run "$@" >/dev/null; }'
_SOURCES = f"""ln -sfn {ROOT}/.venv .venv && mkdir -p tests/lab/demo &&
kubectl get services,endpointslices,nodes -A -o json >tests/lab/demo/cluster.json"""
# Commands to run before a block that begins like this, and why.
LIMITED = {
    # The steps of these targets are tests themselves.
    "make ": _TARGETS,
    # The agent needs systemd, so tests/systemd runs its playbook, and the one that removes kube-proxy's DaemonSet.
    "ansible-playbook -i inventory kubenode.proxy.agent ": _SYNTAX,
    # The lab node has no node command; test_explain_playbook.py runs this playbook.
    "ansible-playbook -i inventory kubenode.proxy.explain ": _SYNTAX,
    # There is no kube-proxy here; tests/kernel/test_migration_playbook.py takes nodes over from one.
    "# Show what would differ on each host, while kube-proxy still runs.": _SYNTAX,
    "export KUBECONFIG=~/.kube/config\nansible-playbook -i inventory kubenode.proxy.migrate ": _SYNTAX,
    "ansible-playbook -i inventory kubenode.proxy.drain ": _SYNTAX,
    # In the laboratory the API server speaks no TLS, and of Services only this one has all endpoints on the only node.
    "ansible-playbook -i inventory kubenode.proxy.verify -e verify_traffic=true": _REACHED,
    # There is no agent, and no pod to move.
    "kubenode-proxy drain ": _HELP,
    "kubectl cordon ": f"{_HELP}; kubectl() {{ :; }}; reboot() {{ :; }}",
    # The stand-in for kubectl knows no selectors.
    "kubectl get events": "kubectl() { :; }",
    # There is no agent to answer, and no pod or network policy.
    "kubenode-proxy status ": _HELP,
    "kubenode-proxy top ": _HELP,
    "kubenode-proxy explain --from shop/web ": _HELP,
    # The stand-in for kubectl only reads.
    "kubectl annotate ": "kubectl() { :; }",
    "kubectl --namespace kube-system delete ": "kubectl() { :; }",
    # There is no agent to start.
    "kubenode-proxy rollback --list": "systemctl() { :; }",
    # The shell has no virtual environment of the clone, and the laboratory's snapshot has other names of nodes.
    "PYTHONPATH=plugins .venv/bin/python ": _SOURCES,
    # The addresses of the example inventories are reserved for documentation.
    "ansible-playbook -i examples/": _SYNTAX,
}
PAGES = pages_with_commands()

KUBECTL = """#!/usr/bin/python3
import json, os, ssl, sys, urllib.request

kinds = {kind: "/api/v1/" + kind for kind in ("services", "nodes", "pods", "namespaces")}
kinds["endpointslices"] = "/apis/discovery.k8s.io/v1/endpointslices"
kinds["networkpolicies"] = "/apis/networking.k8s.io/v1/networkpolicies"
command, wanted, *options = sys.argv[1:]
if command != "get" or options != ["-A", "-o", "json"]:
    sys.exit("error: this stand-in for kubectl does not know " + " ".join(sys.argv[1:]))
config = json.load(open(os.environ["KUBECONFIG"]))
cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
context = ssl.create_default_context(cafile="@AUTHORITY@")
items = []
headers = {"Authorization": "Bearer " + user["token"]}
for kind in wanted.split(","):
    request = urllib.request.Request(cluster["server"] + kinds[kind], headers=headers)
    found = json.load(urllib.request.urlopen(request, context=context))
    version, name = found["apiVersion"], found["kind"][: -len("List")]
    items += [{"apiVersion": version, "kind": name, **item} for item in found["items"]]
json.dump({"apiVersion": "v1", "kind": "List", "items": items}, sys.stdout)
"""


@pytest.fixture(scope="module")
def lab():
    with Lab(f"d{os.getpid() % 10000000}", SNAPSHOT, ["lab-iptables"]) as lab:
        yield lab


@pytest.fixture(scope="module")
def shell(lab):
    # The path of an ssh control socket must be short, so the home directory is short as well.
    with tempfile.TemporaryDirectory(prefix="knp") as scratch:
        home, clone, programs = (Path(scratch, name) for name in ("home", "clone", "bin"))
        for directory in (home, clone, programs, home / ".kube"):
            directory.mkdir()
        copy_clone(clone)
        _write_inventory(clone / "inventory", lab)
        certificates = make_certificates(Path(scratch, "certificates"))
        store = Store()
        for item in _cluster():
            store.put(item)
        server = ApiServer(store, certificates)
        write_kubeconfig(home / ".kube/config", server.url, certificates.authority, server.token)
        collection = home / ".ansible/collections/ansible_collections/kubenode/proxy"
        _program(programs / "kubectl", KUBECTL.replace("@AUTHORITY@", str(certificates.authority)))
        node = f"{sys.executable} -m tests.lab --name {lab.name} --node lab-iptables ssh lab-iptables"
        command = f"cd {collection}/plugins '&&' python3 -m module_utils.command.cli"
        # Status 3 means that a run would change something.
        environment = f"TMPDIR={lab.directory.parent}"
        line = f'{environment} {node} {command} "$@" || [ $? = 3 ]'
        _program(programs / "kubenode-proxy", f"#!/bin/sh\ncd {ROOT}\n{line}\n")
        path = f"{programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        shell = Shell(clone, {"HOME": str(home), "PATH": path, "LC_ALL": "C.UTF-8", "TMPDIR": scratch})
        try:
            status, printed = shell.type(installation_of_ansible())
            assert status == 0, printed
            yield shell
        finally:
            shell.close()
            server.close()


def _cluster() -> list[dict[str, Any]]:
    """Return the objects of the laboratory's snapshot with one Node, worker-1."""
    text = SNAPSHOT.read_text(encoding="utf-8").replace('"lab-iptables"', '"worker-1"')
    items: list[dict[str, Any]] = json.loads(text)["items"]
    return [item for item in items if item["kind"] != "Node" or item["metadata"]["name"] == "worker-1"]


def _write_inventory(directory: Path, lab: Lab) -> None:
    """Write README's inventory, and in variables how to reach the lab node."""
    laboratory = json.loads(lab.inventory.read_text(encoding="utf-8"))["lab"]
    for name in ("group_vars", "host_vars"):
        (directory / name).mkdir(parents=True)
    (directory / "nodes.yml").write_text(inventory_of_readme(), encoding="utf-8")
    reached = {**laboratory["vars"], **laboratory["hosts"]["lab-iptables"], "service_proxy_node_name": "worker-1"}
    # As README says; sudo is the playbooks' default.
    reached["ansible_user"] = USER
    del reached["ansible_become"]
    (directory / "host_vars/worker-1.json").write_text(json.dumps(reached), encoding="utf-8")
    # kernel_unchangeable: a network namespace shares the size of the conntrack table with its host.
    detection = {"clusterCIDR": "10.244.0.0/16,fd00:10:244::/48", "detectLocalMode": "ClusterCIDR"}
    variables: dict[str, object] = {
        "service_proxy_mode": "iptables",
        "kernel_unchangeable": "warn",
        "kernel_mode": "iptables",
    }
    variables["service_proxy_configuration"] = detection
    (directory / "group_vars/all.json").write_text(json.dumps(variables), encoding="utf-8")


def _program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _before(text: str) -> str:
    return next((function for start, function in LIMITED.items() if text.startswith(start)), "")


@pytest.mark.parametrize(
    "page",
    [PAGES[0], *(pytest.param(page, marks=pytest.mark.full) for page in PAGES[1:])],
    ids=lambda page: str(page.relative_to(ROOT).with_suffix("")),
)
def test_commands_run_as_printed(shell, page):
    if page != PAGES[0] and any("kubenode" in block.text for block in command_blocks(page)):
        # These pages assume a node that serves, and that of the rollback one that has served in other ways before.
        for options in ("", "-e service_proxy_mode=nftables", "")[: 3 if page.name == "rollback.md" else 1]:
            status, printed = shell.type(f"ansible-playbook -i inventory kubenode.proxy.converge {options}")
            assert status == 0, printed
    for block in command_blocks(page):
        if block.why_not_run:
            continue
        text = block.text.replace("NODE", "worker-1")
        status, printed = shell.type(text, _before(text))
        assert status == 0, f"{block.place}: {block.text}\n{printed}"
        plays = re.findall(r"^ansible-playbook .* kubenode\.proxy\.(\w+)", text, re.MULTILINE)
        if "--syntax-check" not in _before(text):
            changes = re.findall(r"^worker-1 .* changed=(\d+) .* failed=0 ", printed, re.MULTILINE)
            assert len(changes) == text.count("ansible-playbook "), f"{block.place}: {printed}"
            if page == PAGES[0]:
                changing = [name for name, changed in zip(plays, changes) if int(changed)]
                assert changing == [name for name in plays if name != "verify"], f"{block.place}: {printed}"


@pytest.mark.full
def test_playbooks_name_existing_modules_and_roles(shell):
    """Check modules, roles and keywords in a single run, since starting Ansible takes longest."""
    for number, block in enumerate(playbook_blocks()):
        (shell.directory / f"example-{number}.yml").write_text(block.text, encoding="utf-8")
    status, printed = shell.type("ansible-playbook -i inventory --syntax-check example-*.yml")
    assert status == 0, printed


@pytest.mark.full
def test_an_agent_in_a_namespace_by_hand(tmp_path):
    """Type the lines that docs/dev/debugging.md has for the interpreter."""
    block = next(block for block in command_blocks(ROOT / "docs/dev/debugging.md") if block.text.startswith("mkdir "))
    lines = block.text.replace("/tmp/agent-node", str(tmp_path)).splitlines()
    command = "\n".join(line for line in lines if not line.startswith(">>> "))
    typed = "\n".join(line[4:] for line in lines if line.startswith(">>> "))
    done = subprocess.run(["bash", "-c", command], input=typed, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "10.96.0.1:80" in done.stdout and "table ip kube-proxy {" in done.stdout, done.stdout


def test_a_failing_command_ends_its_block(shell):
    assert shell.type("true\nfalse\necho not reached") == (1, "\n")
    assert shell.type("export SEEN=1\nexit_status() { return 3; }\nexit_status # a comment")[0] == 3
    assert shell.type("echo $SEEN")[1].split() == ["1"]


def test_every_other_page_is_identified_by_its_blocks():
    assert PAGES[0].name == "README.md" and len(PAGES) > 5
    used = [_before(block.text) for page in PAGES for block in command_blocks(page)]
    assert all(function in used for function in LIMITED.values())
