# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook cleanup on a node with everything: agent, timer, kernel settings, and rules of other programs."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from tests.kernel.external_rules import FIREWALLD
from tests.molecule_support.portrait import differences
from tests.waiting import wait_for

from .agent import UNIT, dataplane, picture
from .node import play, run_playbook

TIMER = "kubenode-proxy-schedule.timer"
METRICS = "/var/lib/prometheus/node-exporter"
UNITS = ("kubenode-proxy2.service", "kubenode-proxy-schedule2.timer", "kubenode-proxy.service.d.old")
#: Files of other programs, beside those of the roles and named like them.
BESIDE = (
    *(f"/etc/systemd/system/{name}" for name in UNITS),
    "/etc/systemd/system/multi-user.target.wants/kubenode-proxy2.service",
    "/etc/kubenode-proxy/config.yaml.old",
    "/etc/kubenode-proxy/services.d/own.yaml",
    "/etc/sysctl.d/99-kubenode-proxy2.conf",
    "/etc/modules-load.d/kubenode-proxy2.conf",
    "/etc/modprobe.d/kubenode-proxy2.conf",
    "/usr/local/bin/kubenode-proxy2",
    "/usr/local/lib/kubenode-proxy2/file",
    "/opt/kubenode-proxy2/file",
    "/run/kubenode-proxy2/file",
    "/var/lib/kubenode-proxy2/file",
)
#: Files of the collection from which an operator has removed the first line.
EDITED = ("/etc/sysctl.d/99-kubenode-proxy.conf", "/etc/modules-load.d/kubenode-proxy.conf")


@pytest.fixture(scope="module")
def node(start):
    return start("cleanup")


@pytest.mark.full
def test_nothing_of_the_collection_is_left(node, cluster):
    node.run("nft", "-f", "-", text=FIREWALLD)
    node.run("iptables", "-t", "nat", "-N", "DOCKER")
    node.run("iptables", "-t", "nat", "-A", "PREROUTING", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "DOCKER")
    for path in BESIDE:
        node.run("mkdir", "-p", str(PurePosixPath(path).parent))
        node.write(path, "# of another program\n")
    before, rules = picture(node), dataplane(node)
    variables = {
        "agent_kubeconfig": str(cluster.kubeconfig),
        "agent_configuration": {"mode": "iptables"},
        "schedule_interval": "1h",
        "kernel_mode": "iptables",
        "kernel_install_packages": False,
        "kernel_unchangeable": "warn",
    }
    roles = [f"kubenode.proxy.{name}" for name in ("kernel", "schedule", "agent")]
    play([node], [{"ansible.builtin.include_role": {"name": role}} for role in roles], variables)
    assert node.unit(UNIT, "ActiveState")["ActiveState"] == "active"
    # The agent has stopped it.
    assert node.unit(TIMER, "LoadState")["LoadState"] == "loaded"
    wait_for(lambda: dataplane(node) != rules, what="Services are served")
    # Files of other programs in a directory that the role has created are kept, and so is the directory.
    node.write(f"{METRICS}/other.prom", "")
    node.run("sed", "-i", "1d", *EDITED)
    kept = node.output("cat", *EDITED)
    preview = run_playbook([node], "kubenode.proxy.cleanup", variables, {}, "--check")[node.name]
    assert preview.changed > 5
    assert node.unit(UNIT, "ActiveState")["ActiveState"] == "active"
    done = run_playbook([node], "kubenode.proxy.cleanup", variables, {})[node.name]
    assert done.changed > 5
    assert dataplane(node) == rules
    assert node.output("ls", METRICS).split() == ["other.prom"]
    assert node.output("cat", *EDITED) == kept
    again = run_playbook([node], "kubenode.proxy.cleanup", variables, {})[node.name]
    assert again.changed_tasks == []
    node.run("rm", "-r", "/var/lib/prometheus", *EDITED)
    assert differences(before, picture(node)) == []
    assert {node.output("cat", path) for path in BESIDE} == {"# of another program\n"}
