# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One row for each field of the configuration file, and what follows from a row: reading, validation, the default."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Optional, TypeVar

from .model import KubeProxyConfiguration
from .node_proxy import NodeProxyConfiguration
from .reader import Section
from .values import FieldType

HONOURED = "yes"
PARTLY = "partly"
AGENT = "agent"
NOTHING = "no effect"
NO_MODE = "-"

_ACRONYM = re.compile("CIDRs?|ARP")
_CAPITAL = re.compile("(?<=[a-z])(?=[A-Z])")

Model = TypeVar("Model", KubeProxyConfiguration, NodeProxyConfiguration)


class Field(NamedTuple):
    """One field of the configuration file.

    ``name``: with dots, as in the file. ``kind``: the type; None if the code states how it is read and validated.
    ``attribute``: with dots, in the model; empty for a field that the model does not have. ``effect``: HONOURED, PARTLY
    (``text`` explains), AGENT (only the agent uses it), NOTHING (``text`` says why). ``default``: for the
    documentation, if the model's default is not what a user gets. ``harmless``: values that cause no warning although
    they differ from the default of a field without effect.
    """

    name: str
    kind: Optional[FieldType]
    text: str
    attribute: str
    effect: str
    modes: str
    default: str
    harmless: tuple[Any, ...]


def honoured(
    name: str,
    kind: Optional[FieldType],
    text: str,
    *,
    effect: str = HONOURED,
    modes: str = "all",
    attribute: str = "",
    default: str = "",
    harmless: tuple[Any, ...] = (),
) -> Field:
    """Return the row of a field that has an effect; ``attribute``: if it differs from the name in snake case."""
    if kind and not attribute:
        attribute = _CAPITAL.sub("_", _ACRONYM.sub(lambda found: found.group().capitalize(), name)).lower()
    return Field(name, kind, text, attribute, effect, modes, default, harmless)


#: The row of a field that only the agent uses, and of one without effect.
agent_only = partial(honoured, effect=AGENT)
unused = partial(honoured, effect=NOTHING, modes=NO_MODE)


def value_of(model: Any, attribute: str) -> Any:
    """Return the value of a field by its attribute in the model, with dots."""
    value = model
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def given_value(source: Mapping[str, Any], name: str) -> Any:
    """Return the value that a document gives a field, by its name with dots; None if it gives none."""
    value: Any = source
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def read_fields(fields: Iterable[Field], root: Section, default: Model) -> Model:
    """Return the model with the values of all fields that have a type; record wrong types in the section's findings."""
    values: dict[str, dict[str, Any]] = {"": {}}
    for field in fields:
        block, _dot, name = field.name.rpartition(".")
        section = root.section(block) if block else root
        if field.kind:
            attribute_block, _dot, attribute = field.attribute.rpartition(".")
            value = field.kind.read(section, name, value_of(default, field.attribute))
            values.setdefault(attribute_block, {})[attribute] = value
        else:
            section.rest((name,))
    top = values.pop("")
    blocks = {block: getattr(default, block)._replace(**given) for block, given in values.items()}
    return default._replace(**top, **blocks)


def problems(fields: Iterable[Field], model: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each field whose value is invalid, and the reason."""
    for field in fields:
        reason = field.kind.problem(value_of(model, field.attribute)) if field.kind else ""
        if reason:
            yield field.name, reason
