# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Label selectors (meta/v1 LabelSelector) in canonical form, so that equal selectors are equal values."""

from __future__ import annotations

from typing import Mapping, NamedTuple

from ..fields import Invalid, elements, fields_of, mapping, sequence, shown

IN, NOT_IN, EXISTS, DOES_NOT_EXIST = "In", "NotIn", "Exists", "DoesNotExist"
#: The most values of a condition that is used as an anchor: an index has an entry for each.
MOST_ANCHORS = 16
_WITH_VALUES = (IN, NOT_IN)
_OPERATORS = (IN, NOT_IN, EXISTS, DOES_NOT_EXIST)
_FIELDS = ("matchLabels", "matchExpressions")
_REQUIREMENT_FIELDS = ("key", "operator", "values")


class Requirement(NamedTuple):
    """One condition on the label ``key``. ``values``: those of In and NotIn, empty for the other operators."""

    key: str
    operator: str
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether labels meet the condition; NotIn holds for an absent key."""
        value = labels.get(self.key)
        if self.operator == IN:
            return value in self.values
        if self.operator == NOT_IN:
            return value not in self.values
        return (value is not None) == (self.operator == EXISTS)

    def __str__(self) -> str:
        listed = ",".join(sorted(self.values))
        if self.operator == IN:
            return f"{self.key}={listed}" if len(self.values) == 1 else f"{self.key} in ({listed})"
        if self.operator == NOT_IN:
            return f"{self.key} notin ({listed})"
        return self.key if self.operator == EXISTS else f"!{self.key}"


class LabelSelector(NamedTuple):
    """Conditions that must all hold, sorted and without duplicates; without conditions everything matches."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether labels meet all conditions."""
        return all(requirement.matches(labels) for requirement in self.requirements)

    @property
    def anchor(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of key and value of which matching labels have at least one; empty if there are none, or many.

        The pairs come from the condition with the fewest values. Use them to find candidates in an index by label.
        """
        positive = [item for item in self.requirements if item.operator == IN and len(item.values) <= MOST_ANCHORS]
        if not positive:
            return ()
        best = min(positive, key=lambda item: len(item.values))
        return tuple((best.key, value) for value in sorted(best.values))

    def __str__(self) -> str:
        return ", ".join(map(str, self.requirements)) or "everything"


EVERYTHING = LabelSelector()


def parse_selector(value: object, field: str) -> LabelSelector:
    """Return the selector; null is the empty one, which matches everything.

    Parsing is strict, because an omitted part would make the selector match more: a field, operator or value that is
    not understood is an error. Raises Invalid.
    """
    raw = fields_of(value, _FIELDS, field)
    found: dict[Requirement, None] = {}
    for key, item in mapping(raw.get("matchLabels"), f"{field}.matchLabels").items():
        if not isinstance(item, str):
            raise Invalid(f"{field}.matchLabels[{key}]", f"{shown(item)} is not a string")
        found[Requirement(_key(key, f"{field}.matchLabels"), IN, frozenset((item,)))] = None
    for item in elements(raw.get("matchExpressions"), f"{field}.matchExpressions"):
        found[_requirement(*item)] = None
    return LabelSelector(tuple(sorted(found, key=lambda item: (item.key, item.operator, sorted(item.values)))))


def _key(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise Invalid(field, f"{shown(value)} is not the key of a label")
    return value


def _requirement(value: object, field: str) -> Requirement:
    raw = fields_of(value, _REQUIREMENT_FIELDS, field)
    key = _key(raw.get("key"), f"{field}.key")
    operator = raw.get("operator")
    if operator not in _OPERATORS:
        raise Invalid(f"{field}.operator", f"{shown(operator)} is not one of {', '.join(_OPERATORS)}")
    values = sequence(raw.get("values"), f"{field}.values")
    for position, item in enumerate(values):
        if not isinstance(item, str):
            raise Invalid(f"{field}.values[{position}]", f"{shown(item)} is not a string")
    if operator in _WITH_VALUES and not values:
        raise Invalid(f"{field}.values", f"is empty, and {operator} needs a value")
    if operator not in _WITH_VALUES and values:
        raise Invalid(f"{field}.values", f"must be empty for {operator}")
    return Requirement(key, str(operator), frozenset(values))
