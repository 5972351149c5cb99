# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role kernel: its documented defaults match its defaults, and it runs with and without check mode."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.modules.harness import unanswered_kubeconfig

ROLE = Path(__file__).resolve().parents[2] / "roles/kernel"


def test_specification_agrees_with_defaults():
    options = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    assert {name: option["default"] for name, option in options.items()} == defaults
    readme = (ROLE / "README.md").read_text()
    assert [name for name in options if f"| `{name}` |" not in readme] == []


def test_check_real_again_and_absent(node):
    look = [
        "sh",
        "-c",
        "sysctl net.ipv4.conf.all.route_localnet net.ipv4.ip_forward; cat /etc/*.d/*kubenode-proxy.conf",
    ]
    variables = {
        "kernel_unchangeable": "warn",
        "kernel_sysctls": {"net.ipv4.ip_forward": 1},
        "kernel_conntrack": {"min": 999999},
    }
    recaps = []
    seen = []
    for check, state in (
        (True, "present"),
        (False, "present"),
        (False, "present"),
        (True, "absent"),
        (False, "absent"),
    ):
        recaps.append(node.role("kubenode.proxy.kernel", {**variables, "kernel_state": state}, check=check))
        seen.append(node.run(*look, check=False).stdout)
    assert [recap["changed"] > 0 for recap in recaps] == [True, True, False, True, True]
    assert "route_localnet = 0" in seen[0] and "# Managed" not in seen[0]
    assert "route_localnet = 1" in seen[1] and "ip_forward = 1" in seen[1]
    assert "net.netfilter.nf_conntrack_max = 999999" in seen[1] and "\nnf_conntrack\n" in seen[1]
    assert seen[1] == seen[2] == seen[3]
    assert "# Managed" not in seen[4] and "route_localnet = 1" in seen[4]


def test_the_filter_backend_of_ipvs_mode_decides_which_programs_are_needed(node):
    """Only for ``auto`` the host is asked; a kernel without IPVS is one for iptables."""
    determining = "Determine what filters beside IPVS"
    for filter_backend, asked in (("auto", True), ("nftables", False)):
        role = {"name": "kubenode.proxy.kernel", "tasks_from": "packages"}
        variables = {"kernel_mode": "ipvs", "kernel_ipvs_filter_backend": filter_backend}
        output = node._playbook({"tasks": [{"ansible.builtin.include_role": role}]}, variables).stdout
        result = output.split(determining, 1)[1].split("TASK", 1)[0]
        assert ("skipping:" not in result) is asked, output
        assert "failed=0" in output


def test_for_an_agent_with_mode_auto_the_kernel_is_prepared_as_far_as_it_has_the_modules(node):
    (info,) = node.play({"kubenode.proxy.kernel_modules_info": {"modules": ["ip_vs"]}})
    role = {"name": "kubenode.proxy.agent", "tasks_from": "kernel"}
    variables = {"agent_configuration": {"mode": "auto"}, "kernel_unchangeable": "warn"}
    variables |= {
        "agent_kubeconfig": unanswered_kubeconfig(node.scratch / "kubeconfig"),
        "kernel_install_packages": False,
    }
    output = node._playbook({"tasks": [{"ansible.builtin.include_role": role}]}, variables, "--check", "-v").stdout
    has_ipvs = info["modules"]["ip_vs"]["present"] or info["modules"]["ip_vs"]["installed"]
    assert "failed=0" in output and ('"ip_vs"' in output.split("Load the kernel modules", 1)[1]) is has_ipvs, output
