# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role service_proxy documents its variables as they are."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.modules.harness import ROOT

ROLE = ROOT / "roles" / "service_proxy"
DEFAULTS = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text(encoding="utf-8"))
SPECIFICATIONS = yaml.safe_load((ROLE / "meta" / "argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]
ONLY_OF_INSPECT = {"service_proxy_compare"}
NOT_OF_MAIN = ONLY_OF_INSPECT | {
    "service_proxy_traffic",
    "service_proxy_traffic_services",
    "service_proxy_traffic_timeout",
}
NOT_OF_VERIFY = ONLY_OF_INSPECT | {
    "service_proxy_state",
    "service_proxy_max_unserved_percent",
    "service_proxy_unattended",
    "service_proxy_always_observe",
    "service_proxy_install_packages",
    "service_proxy_directory",
    "service_proxy_history_directory",
    "service_proxy_keep_states",
    "service_proxy_leave_unserved",
    "service_proxy_lock_timeout",
    "service_proxy_confirm_timeout",
    "service_proxy_boot",
    "service_proxy_boot_max_days",
    "service_proxy_probes",
    "service_proxy_default_probes",
    "service_proxy_probe_timeout",
    "service_proxy_kubelet_kubeconfig",
    "service_proxy_kubelet_restart",
}


@pytest.mark.parametrize(("entry", "omitted"), [("main", NOT_OF_MAIN), ("verify", NOT_OF_VERIFY)])
def test_argument_specification_agrees_with_defaults(entry, omitted):
    options = SPECIFICATIONS[entry]["options"]
    assert set(options) == set(DEFAULTS) - omitted
    assert {name: option["default"] for name, option in options.items()} == {name: DEFAULTS[name] for name in options}
    for name, option in options.items():
        assert "choices" not in option or option["default"] in option["choices"], name


def test_every_variable_is_in_the_readme_and_used():
    readme = (ROLE / "README.md").read_text(encoding="utf-8")
    files = [*sorted((ROLE / "tasks").glob("*.yml")), ROLE / "vars" / "main.yml"]
    templates = ROOT / "roles" / "agent" / "templates"
    files += [templates / "api_service.json.j2", templates / "configuration.json.j2"]
    files.append(ROLE / "templates" / "kubenode-proxy-boot.service.j2")
    tasks = "".join(path.read_text(encoding="utf-8") for path in files)
    for name in DEFAULTS:
        assert f"`{name}`" in readme, name
        assert re.search(rf"\b{name}\b", tasks), name
    used = set(re.findall(r"(?<!_)\bservice_proxy_[a-z_]+", tasks)) - {
        "service_proxy_info",
        "service_proxy_confirm",
        "service_proxy_kernel",
    }
    assert used == set(DEFAULTS)
