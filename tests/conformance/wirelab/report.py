# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The result of a run: a row for each case, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .outcomes import Difference

BRIEF_LENGTH = 150


@dataclass
class Row:
    """One case: flows equal and compared, its duration and differences, and the error if it could not be run."""

    case: str
    mode: str
    equal: int = 0
    total: int = 0
    seconds: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    error: str | None = None

    @property
    def whole(self) -> bool:
        """Are all flows equal?"""
        return self.error is None and self.equal == self.total

    def to_json(self) -> dict[str, Any]:
        """Return JSON text."""
        return {**asdict(self), "differences": [difference._asdict() for difference in self.differences]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Row:
        """Return the row of a text of :meth:`to_json`."""
        differences = [Difference(**difference) for difference in content["differences"]]
        return cls(**{**content, "differences": differences})

    def lines(self, verbose: bool = False) -> list[str]:
        """Return the row of the table with the first difference; with *verbose*, the other differences below it."""
        texts = [_describe(difference) for difference in self.differences]
        first = self.error or (texts[0] if texts else "")
        row = f"{self.case:<44} {self.equal:>3}/{self.total:<3} {self.seconds:>5.1f}s  {first}".rstrip()
        return [row, *("    " + text for text in texts[1:])] if verbose else [row]


@dataclass
class Report:
    """All rows of a run, and how long it took as a whole."""

    mode: str
    rows: Sequence[Row]
    seconds: float

    @property
    def equal(self) -> int:
        """Flows that are equal."""
        return sum(row.equal for row in self.rows)

    @property
    def total(self) -> int:
        """Flows compared."""
        return sum(row.total for row in self.rows)

    @property
    def whole_cases(self) -> int:
        """Cases without any difference."""
        return sum(row.whole for row in self.rows)

    @property
    def passed(self) -> bool:
        """Was there anything to run, and is all of it equal?"""
        return bool(self.rows) and self.whole_cases == len(self.rows)

    def summary(self) -> str:
        """Return the last line of the table."""
        return (
            f"{self.mode}: {self.equal}/{self.total} flows equal, {self.whole_cases}/{len(self.rows)} cases,"
            f" {self.seconds:.0f}s"
        )

    def to_json(self) -> str:
        """Return JSON text."""
        return json.dumps(
            {
                "mode": self.mode,
                "cases": [row.to_json() for row in self.rows],
                "equal": self.equal,
                "total": self.total,
                "wholeCases": self.whole_cases,
                "seconds": round(self.seconds, 1),
            },
            indent=1,
        )


def _describe(difference: Difference) -> str:
    return (
        f"[{difference.step}] {difference.flow}: recorded {_brief(difference.recorded)},"
        f" observed {_brief(difference.observed)}"
    )


def _brief(content: Any) -> str:
    return json.dumps(content, sort_keys=True)[:BRIEF_LENGTH]
