# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test for which mode roles prepare the kernel, and for which they install packages."""

from __future__ import annotations

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import ConntrackConfiguration
from tests.unit.roles.rendering import ROLES, rendered

FALLBACK = {"service_proxy_mode": "ipvs", "service_proxy_fallback": "iptables"}


def passed(role: str, file: str, task: str, variable: str) -> str:
    """Return the expression that a task gives to a variable of the role that it runs."""
    tasks = yaml.safe_load((ROLES / role / "tasks" / file).read_text(encoding="utf-8"))
    (found,) = (item for item in tasks if item["name"] == task)
    return found["vars"][variable].strip().removeprefix("{{").removesuffix("}}")


def found(*usable: str, asked: tuple = ("ip_vs", "ip_vs_rr", "nf_tables")) -> dict:
    """Return what the host answers about its modules."""
    modules = {name: {"present": False, "installed": name in usable} for name in asked}
    return {"__agent_modules_found": {"modules": modules}}


def test_the_kernel_is_prepared_for_the_mode_that_the_agent_will_have(tmp_path):
    auto = {"agent_configuration": {"mode": "auto"}}
    cases = [
        ({}, "iptables"),
        ({"service_proxy_mode": "nftables"}, "nftables"),
        ({**auto, **found("ip_vs", "nf_tables")}, "ipvs"),
        ({**auto, **found("nf_tables")}, "nftables"),
        ({"service_proxy_mode": "ipvs", "__agent_modules_found": {"skipped": True}}, "ipvs"),
        ({**FALLBACK, **found("ip_vs", "ip_vs_rr")}, "ipvs"),
        ({**FALLBACK, **found("nf_tables")}, "iptables"),
        ({**FALLBACK, **found("ip_vs")}, "iptables"),
        ({**FALLBACK, "service_proxy_network_policy_standalone": True, **found()}, "none"),
    ]
    expression = passed("agent", "kernel.yml", "Prepare the kernel", "kernel_mode")
    results = rendered(tmp_path, ["agent"], expression, [variables for variables, _mode in cases])
    assert results == [mode for _variables, mode in cases]


def test_the_host_is_asked_for_modules_where_its_mode_depends_on_them(tmp_path):
    (task,) = (
        item
        for item in yaml.safe_load((ROLES / "agent/tasks/kernel.yml").read_text(encoding="utf-8"))
        if item.get("register") == "__agent_modules_found"
    )
    cases = [
        ({"service_proxy_mode": "auto"}, True),
        ({"service_proxy_mode": "ipvs"}, False),
        (FALLBACK, True),
        ({**FALLBACK, "service_proxy_mode": "nftables"}, False),
    ]
    asked = rendered(tmp_path, ["agent"], task["when"], [variables for variables, _asked in cases])
    assert asked == [expected for _variables, expected in cases]


def test_packages_are_those_of_the_mode_in_effect(tmp_path):
    task = "Install what the service proxy needs"
    mode, filter_backend = (
        passed("service_proxy", "packages.yml", task, f"kernel_{name}") for name in ("mode", "ipvs_filter_backend")
    )
    nftables_filter_backend = {"service_proxy_node_configuration": {"ipvsFilterBackend": "nftables"}}
    cases = [
        ({}, ["ipvs", "iptables"]),
        ({"service_proxy_mode": "auto"}, ["ipvs", "iptables"]),
        ({"service_proxy_mode": "nftables"}, ["nftables", "iptables"]),
        ({"service_proxy_configuration": {"mode": "nftables"}}, ["nftables", "iptables"]),
        ({"service_proxy_configuration": {"mode": "userspace"}}, ["userspace", "iptables"]),
        (
            {"service_proxy_mode": "iptables", "service_proxy_configuration": {"mode": "nftables"}},
            ["ipvs", "iptables"],
        ),
        ({"service_proxy_configuration": {"mode": "ipvs"}}, ["ipvs", "auto"]),
        ({"service_proxy_configuration": {"mode": "ipvs"}, **nftables_filter_backend}, ["ipvs", "nftables"]),
        ({"service_proxy_mode": "ipvs", **nftables_filter_backend}, ["ipvs", "nftables"]),
        ({**FALLBACK, **nftables_filter_backend}, ["ipvs", "iptables"]),
        ({"service_proxy_mode": "ipvs", "service_proxy_ipvs_filter_backend": "iptables"}, ["ipvs", "iptables"]),
    ]
    given = [variables for variables, _expected in cases]
    results = rendered(tmp_path, ["service_proxy"], f"[{mode}, {filter_backend}]", given)
    assert [[item.strip() for item in result] for result in results] == [expected for _variables, expected in cases]


def test_the_role_offers_every_setting_of_connection_tracking():
    specification = yaml.safe_load((ROLES / "kernel" / "meta" / "argument_specs.yml").read_text(encoding="utf-8"))
    options = specification["argument_specs"]["main"]["options"]["kernel_conntrack"]["options"]
    wanted = {name: type(value).__name__ for name, value in ConntrackConfiguration().options().items()}
    assert {name: option["type"] for name, option in options.items()} == wanted
