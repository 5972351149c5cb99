# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Objects of this project that remain in the table ``kube-proxy`` after kube-proxy has taken the table over.

kube-proxy writes its own rules into the chains that it shares with this project, so that no rule leads to the others
any more, but it removes only objects that it knows. The map of all endpoints would remain forever.
"""

from __future__ import annotations

from typing import Callable, Iterator, Optional

from ....base.errors import KernelError
from ....rendering.nftables.expressions import Immediate
from ....rendering.nftables.layout import FRONTENDS
from ....rendering.nftables.objects import TABLE_NAME, ObjectKey
from ....rendering.nftables.own_names import is_own
from ....resources import Change, Kind, Resource
from ...netlink.attributes import parse_attributes
from ..attributes import NFTA_SET_ELEM_DATA
from ..decoding import parse_data, parse_expression
from ..expression_schema import SET_NAMES
from ..resource import NftablesResource
from .reading import RawChain, RawKey, RawSet, RawTable, RawValue
from .resource import RawTableResource
from .writing import rule_expressions

_FRONTENDS = ObjectKey("set", FRONTENDS)
#: The attributes by which an expression names a set.


def _called(verdict: object) -> Iterator[ObjectKey]:
    words = verdict.split() if isinstance(verdict, str) else []
    if len(words) == 2:
        yield ObjectKey("chain", words[1])


def references(value: Optional[RawValue]) -> Iterator[ObjectKey]:
    """Yield the sets and chains that a chain's rules or the elements of a verdict map refer to, with duplicates."""
    if isinstance(value, RawChain):
        for rule in value.rules:
            for raw in rule_expressions(rule):
                expression = parse_expression(raw)
                if expression.name in SET_NAMES:
                    yield ObjectKey("set", str(expression.get(SET_NAMES[expression.name], "")))
                elif expression.name == "immediate":
                    yield from _called(expression.get(Immediate.DATA, ""))
    elif isinstance(value, RawSet):
        for element in value.elements:
            found = parse_attributes(memoryview(element), 0, len(element))
            if NFTA_SET_ELEM_DATA in found:
                yield from _called(parse_data(found[NFTA_SET_ELEM_DATA]))


def used(table: RawTable) -> set[RawKey]:
    """Return the objects that kube-proxy may create too, and all objects that they refer to, directly or indirectly."""
    seen: set[RawKey] = {key for key in table if not is_own(key.kind, key.name)}
    waiting = list(seen)
    while waiting:
        for key in references(table.get(waiting.pop())):
            if key not in seen:
                seen.add(key)
                waiting.append(key)
    return seen


class UnusedResource(Resource[RawKey, RawValue]):
    """Sets and chains of one family that only this project creates and that no other object in the table refers to.

    They can only be removed. The kernel refuses to remove one to which another program refers by then.
    """

    kind = Kind.TABLE_OBJECTS
    qualifier = "unused"
    atomic = True

    def __init__(self, family: str, open_table: Callable[[], NftablesResource]) -> None:
        self.family = family
        self._open_table = open_table
        self._raw = RawTableResource(family)

    def observe(self) -> RawTable:
        """See the class. Raises KernelError, also while the table is still this project's."""
        table = self._raw.observe()
        kept = used(table)
        if _FRONTENDS in kept and _FRONTENDS in table:
            raise KernelError(
                f"table {TABLE_NAME} ({self.family}): kube-proxy has not taken it over yet, it still has our rules"
            )
        return {key: value for key, value in table.items() if key not in kept}

    def apply(self, change: Change[RawKey, RawValue]) -> None:
        """Remove the objects in one transaction. Raises KernelError."""
        self._open_table().apply(Change(removed={key: True for key in change.removed if isinstance(key, ObjectKey)}))

    def describe(self, key: RawKey, value: RawValue) -> list[str]:
        """Describe one object approximately as the nft program shows it."""
        return self._raw.describe(key, value)
