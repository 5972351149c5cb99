# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What differs between a kube-proxy, the recordings and this project, as text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conformance.wirelab.cases import Case
from tests.conformance.wirelab.corrections import EQUALS

from .runs import Observed
from .surface import number, table
from .tables import differences
from .verdicts import Finding, Verdict, judge

TEXT_LENGTH = 200
TABLE_LINES = 6


@dataclass
class SettingReport:
    """The findings of one setting, and what could not be compared.

    ``unrecorded``: the cases that could not be run, with the reason. Cases that were never recorded may be of a later
    release; then they are in ``later``.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)
    unrecorded: dict[str, str] = field(default_factory=dict)
    later: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    tables_compared: int = 0
    omitted: str = ""
    cases: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)
    repeated: Sequence[str] = ()

    @property
    def unexpected(self) -> list[Finding]:
        """The findings that need work."""
        return [finding for finding in self.findings if not finding.verdict.expected]

    @property
    def unsettled(self) -> list[str]:
        """The cases that another run may show to be equal."""
        return sorted({finding.case for finding in self.unexpected} | {*self.unrecorded, *self.tables})

    @property
    def passed(self) -> bool:
        """Was everything compared, without a finding that needs work?"""
        return bool(self.findings) and not (self.unexpected or self.unrecorded or self.tables)

    def lines(self) -> list[str]:
        """Return the section of the report."""
        counts = Counter(finding.verdict for finding in self.findings)
        kinds = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()) or "nothing compared"
        theirs, ours = self.seconds
        lines = [f"== {self.name}: {self.cases} cases, {len(self.findings)} flows: {kinds}"]
        lines.append(f"   kube-proxy {theirs:.0f} s, this project {ours:.0f} s")
        lines += [f"   not recorded: {self.omitted}"] if self.omitted else []
        for finding in self.findings:
            if finding.verdict is not Verdict.EQUAL:
                lines.append(f"   {finding.verdict.value}: {finding.case} [{finding.step}] {finding.flow}")
                seen = {"recorded": finding.recorded, "kube-proxy": finding.theirs, "here": finding.ours}
                lines += [f"      {who + ':':<11} {_brief(content)}" for who, content in seen.items()]
        for what, cases in (("", self.unrecorded), (f", which may need kube-proxy {EQUALS}", self.later)):
            lines += [f"   not recorded{what}: {case}: {reason}" for case, reason in cases.items()]
        equal = self.tables_compared - len(self.tables)
        if self.tables_compared:
            lines.append(f"   tables: of {self.tables_compared} cases, {equal} as recorded")
        for case, changes in self.tables.items():
            lines.append(f"   tables of {case}: {len(changes)} lines differ")
            lines += [f"      {line[:TEXT_LENGTH]}" for line in changes[:TABLE_LINES]]
        lines += [f"   repeated alone, since it differed at first: {case}" for case in self.repeated]
        return lines


def compare(cases: Sequence[Case], theirs: Observed, ours: Observed, release: str) -> SettingReport:
    """Return the report of one setting, from what both sides did."""
    setting, reached = theirs.setting, number(release) >= number(EQUALS)
    report = SettingReport(setting.name, cases=len(cases), omitted=theirs.failure or ours.failure)
    report.seconds = theirs.seconds, ours.seconds
    known = table(release)
    for case in () if report.omitted else cases:
        seen, here = theirs.steps(case.name), ours.steps(case.name)
        recording = Path(case.file(f"observed-{setting.mode}.json"))
        if seen is None or here is None:
            side = theirs if seen is None else ours
            due = recording.exists() or reached or seen is not None
            kept = report.unrecorded if due else report.later
            kept[case.name] = f"{side.side}: {side.error(case.name)}"
            continue
        report.findings += judge(case, setting.mode, seen, here, known, reached=reached)
        state = Path(case.file(f"state-{setting.mode}.txt"))
        if state.exists() and state.parent.name == case.name:  # twins have no tables of their own
            report.tables_compared += 1
            changes = differences(state, theirs.state(case.name), case.families)
            if changes:
                report.tables[case.name] = changes
    return report


def _brief(content: Any) -> str:
    return "not run" if content is None else json.dumps(content, sort_keys=True)[:TEXT_LENGTH]
