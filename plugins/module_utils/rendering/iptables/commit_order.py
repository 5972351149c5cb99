# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Order the commits of one change, so that every packet is treated as before the change or as after it.

iptables-restore commits one table after the other. The table nat redirects connections; the table filter refuses, by
their original destination, those that nat does not redirect. So no fixed order of the two is right: with a Service's
first endpoint, the redirection must precede the end of the refusal; with its last one, the refusal must precede the end
of the redirection. Otherwise packets leave the node unchanged meanwhile, and their connections hang.

The order is decided for each *frontend*: destination, protocol and port. Where nat begins to redirect it, all its rules
in filter change after nat, and where nat ceases to, before. Elsewhere nat may redirect other sources than before, so
rules are added before nat and removed after it. If a change has both, filter is committed twice.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, Callable, Iterator, NamedTuple, Optional

from ...resources import Change
from .canonical import target_of
from .names import NODE_PORTS_CHAIN, SERVICES_CHAIN

_MANGLE, _FILTER, _NAT = "mangle", "filter", "nat"

_ACCEPT = "ACCEPT"
_REFUSALS = ("DROP", "REJECT", "RETURN")
_FRONTEND = re.compile(r"(?:(?:! )?-s \S+ )?(?:-d (\S+) )?(?:(?:! )?-i \S+ )?-p (\w+) .*--dport (\d+) .*-j ").match


class Commit(NamedTuple):
    """The change of one table, which takes effect as a whole."""

    table: str
    change: Change[Any, Any]


class Frontend(NamedTuple):
    """What a rule matches. Node ports have no destination; rules that match otherwise have no field at all."""

    destination: str = ""
    protocol: str = ""
    port: str = ""


_OTHER = Frontend()


class _Moment(Enum):
    """When rules of the table filter change, relative to those of the table nat.

    AROUND: they are added before and removed after it. ANY: the order has no effect.
    """

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    ANY = "any"


class _Chain(NamedTuple):
    """The rules of one key of a change, before it and after it."""

    old: tuple[str, ...]
    new: tuple[str, ...]

    def gone(self) -> Iterator[str]:
        kept = set(self.new)
        return (rule for rule in self.old if rule not in kept)

    def come(self) -> Iterator[str]:
        had = set(self.old)
        return (rule for rule in self.new if rule not in had)

    def between(self, stays: Callable[[str], bool], comes: Callable[[str], bool]) -> tuple[str, ...]:
        """Return the rules that are in force while only some of the old ones stay and some of the new ones come."""
        had, kept = set(self.old), set(self.new)
        rules: list[str] = []
        position = 0
        for rule in self.old:
            while rule in kept and position < len(self.new):
                candidate = self.new[position]
                position += 1
                if candidate == rule:
                    break
                if candidate not in had and comes(candidate):
                    rules.append(candidate)
            if rule in kept or stays(rule):
                rules.append(rule)
        rules += [rule for rule in self.new[position:] if rule not in had and comes(rule)]
        return tuple(rules)


def _rules(key: Any, value: Any) -> tuple[str, ...]:
    """Return the rules of a chain, or of a jump as often as it occurs; none where only the chain's existence counts."""
    if isinstance(value, int):
        return (key.rule,) * value
    return value if isinstance(value, tuple) else ()


def _chains(change: Change[Any, Any]) -> Iterator[tuple[Any, _Chain]]:
    for key, value in change.removed.items():
        yield key, _Chain(_rules(key, value), ())
    for key, (old, new) in change.replaced.items():
        yield key, _Chain(_rules(key, old), _rules(key, new))
    for key, value in change.added.items():
        yield key, _Chain((), _rules(key, value))


def _frontend(rule: str) -> Frontend:
    match = _FRONTEND(rule)
    return _OTHER if match is None else Frontend(match[1] or "", match[2], match[3])


def _is_jump(rule: str) -> bool:
    return target_of(rule) not in ("", _ACCEPT, *_REFUSALS)


class _Redirections:
    """The frontends that the table nat begins or ceases to redirect."""

    def __init__(self, change: Change[Any, Any]) -> None:
        names = (SERVICES_CHAIN, NODE_PORTS_CHAIN)
        chains = {key.chain: chain for key, chain in _chains(change) if key.chain in names}
        come = {_frontend(rule) for chain in chains.values() for rule in chain.come()}
        gone = {_frontend(rule) for chain in chains.values() for rule in chain.gone()}
        self._begun, self._ended = come - gone - {_OTHER}, gone - come - {_OTHER}
        self._chains = chains
        self._known: Optional[set[Frontend]] = None

    def moment(self, frontend: Frontend) -> _Moment:
        """Return when the rules for a frontend change."""
        if frontend in self._begun:
            return _Moment.AFTER
        return _Moment.BEFORE if frontend in self._ended else _Moment.AROUND

    def never(self, frontend: Frontend) -> bool:
        """Return whether the frontend is redirected neither before the change nor after it."""
        chain = SERVICES_CHAIN if frontend.destination else NODE_PORTS_CHAIN
        if frontend == _OTHER or chain not in self._chains:
            return False
        if self._known is None:
            self._known = {_frontend(rule) for each in self._chains.values() for rule in (*each.old, *each.new)}
        return frontend not in self._known


class _Refusals:
    """The changed rules of the table filter, and when they change."""

    def __init__(self, change: Change[Any, Any], nat: Change[Any, Any]) -> None:
        self._chains = dict(_chains(change))
        self._redirections = _Redirections(nat)
        come = [rule for chain in self._chains.values() for rule in chain.come()]
        gone = [rule for chain in self._chains.values() for rule in chain.gone()]
        frontends = {_frontend(rule) for rule in (*come, *gone) if target_of(rule) in _REFUSALS}
        self._frontends = {frontend: self._redirections.moment(frontend) for frontend in frontends}
        # Chains that were there already may refuse what nat is about to redirect, so the jumps to them wait for it.
        self._jumps = _Moment.AFTER if not gone and all(map(_is_jump, come)) else _Moment.BEFORE
        self.moments = self._needed(come, gone)
        if len(self.moments) > 1:
            never = list(filter(self._redirections.never, frontends))
            self._frontends.update(dict.fromkeys(never, _Moment.ANY))
            self.moments = self._needed(come, gone)

    def _needed(self, come: list[str], gone: list[str]) -> set[_Moment]:
        """Return the moments at which rules have to change."""
        return {*map(self._coming, come), *map(self._going, gone)} - {_Moment.ANY}

    def _moment(self, rule: str, otherwise: _Moment) -> _Moment:
        if target_of(rule) not in _REFUSALS:
            return otherwise
        moment = self._frontends[_frontend(rule)]
        return otherwise if moment is _Moment.AROUND else moment

    def _coming(self, rule: str) -> _Moment:
        return self._jumps if _is_jump(rule) else self._moment(rule, _Moment.BEFORE)

    def _going(self, rule: str) -> _Moment:
        return self._moment(rule, _Moment.AFTER)

    def between(self, key: Any) -> tuple[str, ...]:
        """Return the rules of a key while nat changes."""
        chain: _Chain = self._chains[key]
        return chain.between(
            lambda rule: self._going(rule) is _Moment.AFTER, lambda rule: self._coming(rule) is not _Moment.AFTER
        )


def _around_nat(change: Change[Any, Any], nat: Change[Any, Any]) -> tuple[Change[Any, Any], Change[Any, Any]]:
    """Return the parts of a change of the table filter that come before and after the change of the table nat."""
    refusals = _Refusals(change, nat)
    if _Moment.AFTER not in refusals.moments:
        return change, Change()
    if _Moment.BEFORE not in refusals.moments:
        return Change(), change
    before: Change[Any, Any] = Change()
    after: Change[Any, Any] = Change()
    for key, value in change.added.items():
        rules = refusals.between(key)
        if isinstance(value, int) and not rules:
            after.added[key] = value
        else:
            before.added[key] = rules if isinstance(value, tuple) else value
            if before.added[key] != value:
                after.replaced[key] = (before.added[key], value)
    for key, (old, new) in change.replaced.items():
        rules = refusals.between(key)
        middle = len(rules) if isinstance(new, int) else rules if isinstance(new, tuple) else new
        if middle != old:
            before.replaced[key] = (old, middle)
        # Also where both are equal: the chain is then to be written again.
        if middle != new or middle == old:
            after.replaced[key] = (middle, new)
    # Chains remain, perhaps empty, until the last jump to them is removed.
    for key, value in change.removed.items():
        rules = refusals.between(key)
        middle = rules if isinstance(value, tuple) else value
        if middle != value:
            before.replaced[key] = (value, middle)
        after.removed[key] = middle
    return before, after


def commits(change: Change[Any, Any]) -> list[Commit]:
    """Return the commits that make a change, in their order.

    A key has a table and a chain; its value is a tuple of rules, the number of times that the rule of a jump occurs, or
    a text if only the existence of the chain counts.
    """
    tables: dict[str, Change[Any, Any]] = {}

    def of(key: Any) -> Change[Any, Any]:
        return tables.setdefault(key.table, Change())

    for key, value in change.removed.items():
        of(key).removed[key] = value
    for key, pair in change.replaced.items():
        of(key).replaced[key] = pair
    for key, value in change.added.items():
        of(key).added[key] = value
    last: Change[Any, Any] = Change()
    if _FILTER in tables and _NAT in tables:
        tables[_FILTER], last = _around_nat(tables[_FILTER], tables[_NAT])
    others = tables.keys() - {_MANGLE, _FILTER, _NAT}
    ordered = [Commit(table, tables[table]) for table in (_MANGLE, _FILTER, _NAT, *sorted(others)) if table in tables]
    ordered.insert(len(ordered) - len(others), Commit(_FILTER, last))
    if _MANGLE in tables and not any(rule for _key, chain in _chains(tables[_MANGLE]) for rule in chain.come()):
        # What is refused there is refused by filter from now on.
        ordered.append(ordered.pop(0))
    return [commit for commit in ordered if commit.change]
