# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading the fields of a configuration one by one, recording invalid values and unknown fields."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional

from ..base.durations import parse_duration
from ..base.errors import ConfigurationError
from ..cluster.fields import shown, suggestion

_KUBE_PROXY = "KubeProxyConfiguration"
# How similar an unknown field must be to one that exists in order to count as misspelt: difflib's ratio.
_MISSPELT = 0.8


class Findings:
    """Problems, which make a document of the configuration invalid, and warnings, which do not.

    ``kind``: that of the document, with which each line starts.
    """

    def __init__(self, kind: str = _KUBE_PROXY) -> None:
        self.kind = kind
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def problem(self, field: str, reason: str) -> None:
        """Record that a field is invalid."""
        self.problems.append(f"{field}: {reason}")


def raise_all(*findings: Findings) -> None:
    """Raise one ConfigurationError with the problems of all documents if there are any."""
    found = [f"{item.kind}: {'; '.join(item.problems)}" for item in findings if item.problems]
    if found:
        raise ConfigurationError("; ".join(found))


def _seconds(value: Any) -> Any:
    return parse_duration(value) if isinstance(value, str) else None


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Section:
    """An object of the configuration.

    Its methods return the default for absent and null fields, and record a problem for a wrong type.
    """

    def __init__(self, values: Mapping[str, Any], path: str, findings: Findings) -> None:
        self._values = values
        self._path = path
        self._known: list[str] = []
        self._sections: dict[str, Section] = {}
        self.findings = findings

    def field(self, name: str) -> str:
        """Return the full path of a field."""
        return f"{self._path}.{name}" if self._path else name

    def _get(self, name: str) -> Any:
        self._known.append(name)
        return self._values.get(name)

    def wrong(self, name: str, value: Any, expected: str) -> None:
        """Record that the value of a field is not ``expected``."""
        self.findings.problem(self.field(name), f"{shown(value)} is not {expected}")

    def _read(self, name: str, default: Any, is_valid: Callable[[Any], bool], expected: str) -> Any:
        """Return the value of a field; the default if it is absent, null, or recorded as not ``expected``."""
        value = self._get(name)
        if value is None or is_valid(value):
            return default if value is None else value
        self.wrong(name, value, expected)
        return default

    def text(self, name: str, default: str = "") -> str:
        """Read a string; an empty one gives the default too."""
        return self._read(name, default, lambda value: isinstance(value, str), "a string") or default

    def flag(self, name: str, default: bool) -> bool:
        """Read a boolean."""
        return bool(self._read(name, default, lambda value: isinstance(value, bool), "true or false"))

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """Read an integer from ``low`` to ``high``."""
        value: int = self._read(name, default, _is_integer, "an integer")
        if low <= value <= high:
            return value
        self.wrong(name, value, f"between {low} and {high}")
        return default

    def number(self, name: str, default: float) -> float:
        """Read a number; 0 gives the default too."""
        return float(self._read(name, default, lambda value: type(value) in (int, float), "a number") or default)

    def duration(self, name: str, default: float, zero: Optional[float] = None) -> float:
        """Read a duration and return seconds. ``zero`` replaces a duration of 0 where the API treats 0 as unset."""
        value = self._read(name, None, lambda value: _seconds(value) is not None, "a duration such as 30s or 1m30s")
        seconds = default if value is None else _seconds(value)
        return zero if zero is not None and seconds == 0 else seconds

    def strings(self, name: str) -> tuple[str, ...]:
        """Read a list of strings."""
        return tuple(self._read(name, (), _is_list_of_strings, "a list of strings"))

    def section(self, name: str) -> Section:
        """Return the object in a field, the same at each call; an empty one if it is absent."""
        if name not in self._sections:
            value = self._read(name, {}, lambda value: isinstance(value, dict), "an object")
            self._sections[name] = Section(value, self.field(name), self.findings)
        return self._sections[name]

    def items(self, name: str) -> tuple[tuple[str, Any], ...]:
        """Return the pairs of an object with arbitrary names."""
        section = self.section(name)
        return section.rest(tuple(section._values))

    def rest(self, names: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
        """Return those of the fields ``names`` that are present, unchecked, and mark all of them as known."""
        self._known.extend(names)
        return tuple((name, self._values[name]) for name in names if name in self._values)

    def finish(self) -> None:
        """Record each unknown field here and in the sections, that is each non-null field that no method has read.

        A misspelt field is a problem: its setting would silently be the default. Other unknown fields of a
        KubeProxyConfiguration cause warnings, since a later kube-proxy may know them; those of a document that only
        this project reads are problems as well.
        """
        for section in self._sections.values():
            section.finish()
        for name, value in self._values.items():
            if name in self._known or value is None:
                continue
            field = shown(self.field(str(name)))
            meant = suggestion(str(name), self._known, _MISSPELT)
            if meant or self.findings.kind != _KUBE_PROXY:
                self.findings.problems.append(f"unknown field {field}{meant}")
            else:
                self.findings.warnings.append(f"{self.findings.kind}: unknown field {field}")
