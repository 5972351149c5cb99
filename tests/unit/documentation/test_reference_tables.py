# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hand-written table of findings in the documentation agrees with the code of preflight."""

from __future__ import annotations

import re

from ansible_collections.kubenode.proxy.plugins.module_utils.preflight import findings
from tests.conftest import ROOT

#: Findings about the cluster's state are in the table of a Service that does not answer.
OF_THE_CLUSTER = {findings.NODE, findings.INCOMPLETE_SNAPSHOT, findings.LOSS, findings.OTHER_CLUSTER}


def rows(page: str, head: str) -> list[list[str]]:
    """Return the cells of the table whose head begins with this text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = text.split(head, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def severities() -> dict[str, set[str]]:
    """Return the severities with which preflight reports each finding."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "plugins/module_utils/preflight").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name, severity in re.findall(r"\bFinding\(\s*([A-Z_]+),\s*(ERROR|WARNING),", text):
            value = getattr(findings, name.replace("_FINDING", ""))
            found.setdefault(value, set()).add(severity.lower())
    return found


def test_every_finding_is_listed_with_its_severity() -> None:
    shown: dict[str, set[str]] = {}
    for names, severity, *_others in rows("docs/troubleshooting.md", "| finding |"):
        for name in re.findall(r"`([^`]+)`", names):
            shown[name] = set(severity.split(" or "))
    found = severities()
    assert set(found) == set(findings.NAMES)
    assert shown == {name: severity for name, severity in found.items() if name not in OF_THE_CLUSTER}
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert all(f"`[{name}]`" in text for name in OF_THE_CLUSTER)
