# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The variables of playbooks in docs/variables.md are those that the playbooks read."""

from __future__ import annotations

import re

from tests.conftest import ROOT
from tests.documentation import collection
from tests.documentation.playbook_variables import VARIABLES

# A role's variable, a part of another name, an attribute or an example of a command line is none of these.
_NAME = r"(?<![\w.])((?:cleanup|drain|explain|migrate|proxy|rollback|verify)_[a-z_]+)\b(?!=)"
# A list, a quoted text, a number or a truth value. Others are templates.
_LITERAL = re.compile(_NAME + r" \| default\((\[[^]]*\]|'[^']+'|\d+|true|false)[,)]")


def texts() -> dict[str, str]:
    """Return the text of each playbook, with its task files and without comments."""
    found = {}
    for name in collection.playbook_names():
        paths = [ROOT / "playbooks" / f"{name}.yml"]
        paths += sorted((ROOT / "playbooks" / "migration").glob("*.yml")) if name == "migrate" else []
        role = ROOT / "roles" / "service_proxy"
        paths += [role / "tasks" / "placement.yml"] if name == "migrate" else []
        paths += [role / "tasks" / "unserved.yml"] if name in ("agent", "cleanup", "converge") else []
        paths += [role / "tasks" / "place.yml"] if name in ("agent", "cleanup", "converge", "migrate") else []
        paths += [role / "vars" / "main.yml"] if name in ("report", "verify") else []
        # Every play gets its hosts from the lookup, which reads the variable.
        paths.append(ROOT / "plugins" / "lookup" / "hosts.py")
        found[name] = "\n".join(re.sub(r"(?m)^ *#.*$", "", path.read_text(encoding="utf-8")) for path in paths)
    return found


def own(text: str) -> set[str]:
    """Return the variables that a playbook sets itself, as results, facts or variables of tasks."""
    return {*re.findall(rf"register: {_NAME}", text), *re.findall(rf"(?m)^ +{_NAME}:", text)}


def test_every_variable_is_described_and_is_read() -> None:
    described = {(item.name, playbook) for item in VARIABLES for playbook in item.playbooks}
    read = {(name, playbook) for playbook, text in texts().items() for name in set(re.findall(_NAME, text)) - own(text)}
    assert read == described
    assert all(item.text for item in VARIABLES)
    assert list(VARIABLES) == sorted(VARIABLES, key=lambda item: (item.name, item.playbooks))


def test_defaults_are_those_of_the_playbooks() -> None:
    described: dict[tuple[str, str], str] = {
        (item.name, playbook): item.default for item in VARIABLES for playbook in item.playbooks
    }
    found = {
        (name, playbook, default.strip("'"))
        for playbook, text in texts().items()
        for name, default in _LITERAL.findall(text)
        if name not in own(text)
    }
    differing = {item for item in found if described[item[0], item[1]] != item[2]}
    assert len(found) > 30 and differing == set()


def test_defaults_of_modules_are_those_of_the_modules() -> None:
    modules = collection.modules()
    documented = {
        "migrate_kube_proxy_name": modules["kube_proxy_placement"]["doc"]["options"]["name"],
        "migrate_kube_proxy_namespace": modules["kube_proxy_placement"]["doc"]["options"]["namespace"],
        "migrate_label": modules["kube_proxy_placement"]["doc"]["options"]["label"],
        "proxy_report_stale_after": modules["fleet_report"]["doc"]["options"]["stale_after"],
        "proxy_report_title": modules["fleet_report"]["doc"]["options"]["title"],
    }
    defaults = {item.name: item.default for item in VARIABLES}
    assert {name: defaults[name] for name in documented} == {
        name: f"{option['default']:g}" if isinstance(option["default"], float) else str(option["default"])
        for name, option in documented.items()
    }
