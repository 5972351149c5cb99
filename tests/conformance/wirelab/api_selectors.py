# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Label and field selectors, as a list or watch request gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_BETWEEN_REQUIREMENTS = re.compile(r",(?![^(]*\))")
_SET_REQUIREMENT = re.compile(r"^(\S+)\s+(in|notin)\s+\((.*)\)$")
_FIELD_OPERATOR = re.compile(r"!=|==|=")


def labels_match(selector: str | None, labels: Mapping[str, str]) -> bool:
    """Do the labels meet every requirement? Without a selector everything does."""
    parts = (part.strip() for part in _BETWEEN_REQUIREMENTS.split(selector or ""))
    return all(_requirement_met(part, labels) for part in parts if part)


def _requirement_met(requirement: str, labels: Mapping[str, str]) -> bool:
    in_set = _SET_REQUIREMENT.match(requirement)
    if in_set:
        key, operator, values = in_set.groups()
        return (labels.get(key) in [value.strip() for value in values.split(",")]) == (operator == "in")
    if "!=" in requirement:
        key, value = requirement.split("!=", 1)
        return labels.get(key.strip()) != value.strip()
    if "=" in requirement:
        key, value = requirement.replace("==", "=").split("=", 1)
        return labels.get(key.strip()) == value.strip()
    if requirement.startswith("!"):
        return requirement[1:].strip() not in labels
    return requirement in labels


def fields_match(selector: str | None, item: Mapping[str, Any]) -> bool:
    """Do the fields (``metadata.name=x``, ``spec.clusterIP!=None``) have these values? A missing field is empty."""
    for requirement in filter(None, (selector or "").split(",")):
        path, value = _FIELD_OPERATOR.split(requirement, maxsplit=1)
        current: Any = item
        for part in path.strip().split("."):
            current = current.get(part) if isinstance(current, dict) else None
        if ((current or "") == value.strip()) == ("!=" in requirement):
            return False
    return True
