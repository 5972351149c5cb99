# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Label and field selectors of the forms that clients of Services, EndpointSlices and Nodes send."""

from __future__ import annotations

import re
from typing import Any, Callable

Object = dict[str, Any]
Predicate = Callable[[Object], bool]

_SET_REQUIREMENT = re.compile(r"^(\S+)\s+(in|notin)\s+\(([^)]*)\)$")


def _split(selector: str) -> list[str]:
    """Return the requirements of a selector; commas inside parentheses do not separate them."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", selector) if part.strip()]


def _label_requirement(text: str) -> Callable[[dict[str, str]], bool]:
    in_set = _SET_REQUIREMENT.match(text)
    if in_set:
        key, values = in_set.group(1), {value.strip() for value in in_set.group(3).split(",")}
        if in_set.group(2) == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if "!=" in text:
        key, _, value = text.partition("!=")
        return lambda labels: labels.get(key.strip()) != value.strip()
    if "=" in text:
        key, _, value = text.replace("==", "=").partition("=")
        return lambda labels: labels.get(key.strip()) == value.strip()
    if text.startswith("!"):
        return lambda labels: text[1:].strip() not in labels
    return lambda labels: text in labels


def label_predicate(selector: str) -> Predicate:
    """Return whether an object's labels satisfy every requirement of a label selector, as a function."""
    requirements = [_label_requirement(part) for part in _split(selector)]

    def matches(item: Object) -> bool:
        labels = item.get("metadata", {}).get("labels") or {}
        return all(requirement(labels) for requirement in requirements)

    return matches


def _field(item: Object, path: str) -> str:
    value: Any = item
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def field_predicate(selector: str) -> Predicate:
    """Return whether an object's fields satisfy every requirement of a field selector, as a function.

    Raises ValueError for a requirement without an operator.
    """
    requirements = []
    for part in _split(selector):
        matched = re.match(r"^([^!=]+)(!=|==|=)(.*)$", part)
        if not matched:
            raise ValueError(f"invalid selector: '{part}'; can't understand '{part}'")
        requirements.append((matched.group(1).strip(), matched.group(2), matched.group(3).strip()))
    return lambda item: all(
        (_field(item, path) == value) == (operator != "!=") for path, operator, value in requirements
    )
