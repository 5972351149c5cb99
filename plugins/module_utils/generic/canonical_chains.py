# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rules of declared chains as iptables prints them.

A rule can be written in many ways, and only iptables knows how it will print one. So the declared rules are first
loaded into a separate, empty network namespace and printed from there: every mistake is found before the node is
changed, and the current rules can be compared with the declared ones text by text.

The namespace ends with the thread that created it. The node's own tables and its xtables lock are not involved: the
programs of the legacy variant use a lock file of their own there.
"""

from __future__ import annotations

import ctypes
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Collection, Iterable, Iterator, Mapping, NamedTuple, Optional, Pattern, Sequence

from ..base.addresses import IPV6, unpacked
from ..base.errors import KernelError
from ..kernel.ipset.names import set_names
from ..kernel.ipset.sets import IpsetSocket
from ..kernel.programs import run
from ..kernel.xtables.chains import SavedTables, parse_save
from ..kernel.xtables.restore import DEFAULT_WAIT, failure_line
from ..kernel.xtables.variant import XtablesVariant
from ..rendering.iptables.canonical import canonical_rule
from ..rendering.iptables.rule_parsing import tokens_of
from ..rendering.iptables.tables import ChainKey
from ..rendering.ipvs.model import SetDefinition
from .listed_chains import ListedChain, jump_text, section

_CLONE_NEWNET = 0x40000000
# The lock file is the input, a file in memory that no other program locks.
_SCRIPT = 'XTABLES_LOCKFILE=/proc/self/fd/0; export XTABLES_LOCKFILE; "$1" $3 --noflush && exec "$2"'


def _unshare() -> None:
    """Move the calling thread into an empty network namespace. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def _set_like(own: SetDefinition, family: str) -> SetDefinition:
    """Return a definition that a rule of the family accepts exactly if it accepts the node's own set.

    Rules depend on a set's family only. A hash of addresses needs no further settings, so it replaces types that do,
    and those without a family, which suit rules of both.
    """
    plain = own.family and own.type.startswith("hash:")
    return SetDefinition(own.type if plain else "hash:ip", own.family or family)


def _copies_of(names: Collection[str], family: str) -> dict[str, SetDefinition]:
    """Return what to create in place of those of the named ipsets that exist. Raises KernelError."""
    if not set(set_names()).intersection(names):
        return {}
    with IpsetSocket() as sock:
        found = sock.headers()
    return {name: _set_like(own, family) for name, own in found.items() if name in names}


def _printed_there(variant: XtablesVariant, text: str, sets: Mapping[str, SetDefinition], wait: float) -> Optional[str]:
    """Do the work of :func:`printed_elsewhere` in a thread, which the new namespace belongs to alone."""
    try:
        _unshare()
    except OSError:
        return None
    if sets:
        with IpsetSocket() as sock:
            sock.create(sets)
    # Programs that do not know the variable of the lock file wait for the node's lock.
    waiting = f"-w {max(1, round(wait))}" if variant.restore_waits else ""
    done = run(["/bin/sh", "-c", _SCRIPT, "sh", variant.restore, variant.save, waiting], text)
    if done.status:
        raise KernelError(failure_line(variant, text, done, wait))
    return done.output


def printed_elsewhere(variant: XtablesVariant, text: str, sets: Collection[str], wait: float) -> Optional[str]:
    """Return what iptables-save prints after ``text`` was restored in an empty namespace.

    ``sets``: the names of ipsets that the rules may refer to; those that exist have an empty copy there. None without
    the right to create a namespace. Raises KernelError naming the line that iptables refuses.
    """
    copies = _copies_of(sets, variant.family) if sets else {}
    with ThreadPoolExecutor(max_workers=1) as elsewhere:
        return elsewhere.submit(_printed_there, variant, text, copies, wait).result()


Rules = tuple[str, ...]

# These options refer to objects that the empty namespace does not have.
_UNTRIED = re.compile(r"--nfacct-name |--object-pinned ")
# Rules with these options are compared by their canonical texts, since not every node can try them.
_OF_SETS = re.compile(r"--match-set |(?:-j|--jump) SET ")
# Several addresses in a canonical rule, which starts with its addresses.
_SOURCES = re.compile(r"(-s )([^\s\"]*,[^\s\"]*)(?= |$)")
_DESTINATIONS = re.compile(r"((?:(?:! )?-s \S+ )?-d )([^\s\"]*,[^\s\"]*)(?= |$)")


class _Declared(NamedTuple):
    """A rule of a listed chain, or a jump into it: where it is declared, and the chain that holds it."""

    where: str
    table: str
    holder: str
    rule: str


def _rules_of(chain: ListedChain) -> list[_Declared]:
    where = f"chain {chain.table} {chain.name}"
    return [
        _Declared(f"{where}: rules[{number}]", chain.table, chain.name, rule) for number, rule in enumerate(chain.rules)
    ]


def _jumps_of(chain: ListedChain) -> list[_Declared]:
    where = f"chain {chain.table} {chain.name}"
    return [
        _Declared(f"{where}: jumps[{number}]", chain.table, jump.origin, jump_text(chain, jump))
        for number, jump in enumerate(chain.jumps or ())
    ]


def _names_in(rule: str) -> Iterator[str]:
    """Yield every part of a declared rule that can be its target.

    Which spellings iptables takes, of ``--jump NAME``, ``--goto=NAME`` and ``-gNAME``, depends on its version.
    """
    for word in tokens_of(rule):
        yield word
        yield word.partition("=")[2] if word.startswith("--") else word[2:]


def _external_chains(declared: Iterable[_Declared], chains: Sequence[ListedChain], saved: SavedTables) -> set[ChainKey]:
    """Return the external chains that may be meant by the rules and jumps; the empty namespace needs them."""
    listed = {ChainKey(chain.table, chain.name) for chain in chains}
    named: set[ChainKey] = set()
    for item in declared:
        named.add(ChainKey(item.table, item.holder))
        named.update(ChainKey(item.table, name) for name in _names_in(item.rule))
    return {key for key in named if key in saved.chains and key not in saved.builtin and key not in listed}


def comparable(rule: str, family: str) -> str:
    """Return a rule that iptables-save prints in the form in which canonical_chains returns it."""
    return canonical_rule(rule, family) if _UNTRIED.search(rule) or _OF_SETS.search(rule) else rule


def _marker(family: str) -> str:
    """Return, as iptables prints it, a rule that nobody declares; it needs no extension of the kernel."""
    raw = b"\xfd" + secrets.token_bytes(15) if family == IPV6 else b"\xf0" + secrets.token_bytes(3)
    return f"-s {unpacked(raw)}/{len(raw) * 8}"


def _assigned(items: Sequence[_Declared], rules: Sequence[str], marker: str) -> Iterator[tuple[_Declared, Rules]]:
    """Yield each declared rule of one chain with the printed rules up to its marker. Raises KernelError."""
    position = 0
    for item in items:
        end = next((number for number in range(position, len(rules)) if rules[number] == marker), position)
        if end == position:
            raise KernelError(f"{item.where}: iptables-save does not print the rule where it was added: {item.rule}")
        yield item, tuple(rules[position:end])
        position = end + 1
    if position < len(rules):
        raise KernelError(f"{items[-1].where}: iptables-save prints another rule behind it: {rules[position]}")


def _sets_in(declared: Iterable[_Declared]) -> set[str]:
    """Return every word of the rules that can be the name of an ipset; nothing if no rule refers to any."""
    rules = [item.rule for item in declared if "set" in item.rule.lower()]
    return {word for rule in rules for name in _names_in(rule) for word in (name, name.partition("=")[2])}


def _printed(
    variant: XtablesVariant,
    chains: Sequence[ListedChain],
    declared: Sequence[_Declared],
    saved: SavedTables,
    wait: float,
) -> dict[_Declared, Rules]:
    """Return the printed rules of each declared one; nothing without the right to create a namespace.

    A marker follows each declared rule, because only iptables knows how many rules it makes of ``-s A,B``. Raises
    KernelError.
    """
    marker = _marker(variant.family)
    lines: dict[str, list[str]] = {}
    held: dict[ChainKey, list[_Declared]] = {}
    for table, name in sorted(_external_chains(declared, chains, saved)):
        lines.setdefault(table, []).append(f":{name} - [0:0]")
    for chain in chains:
        lines.setdefault(chain.table, []).append(f":{chain.name} - [0:0]")
    for item in declared:
        lines[item.table] += [f"-A {item.holder} {item.rule}", f"-A {item.holder} {marker}"]
        held.setdefault(ChainKey(item.table, item.holder), []).append(item)
    printed = printed_elsewhere(variant, section(lines), _sets_in(declared), wait)
    if printed is None:
        return {}
    found = parse_save(printed).chains
    return {item: rules for key, items in held.items() for item, rules in _assigned(items, found.get(key, ()), marker)}


def _of_each_address(text: str, addresses: Pattern[str], family: str) -> Iterator[str]:
    """Yield the rule with each of several addresses, or the rule as it is; the pattern's second group matches them."""
    found = addresses.match(text)
    if found is None:
        yield text
        return
    for address in found.group(2).split(","):
        yield canonical_rule(f"{text[: found.start(2)]}{address}{text[found.end(2) :]}", family)


def _derived(rule: str, family: str) -> Rules:
    """Return the canonical texts that this module can derive without a namespace to test the rule in.

    A negated list of addresses stays one rule, which iptables refuses: rules of each would together match any address.
    """
    texts = [canonical_rule(rule, family)]
    for addresses in (_SOURCES, _DESTINATIONS):
        texts = [single for text in texts for single in _of_each_address(text, addresses, family)]
    return tuple(texts)


def canonical_chains(
    variant: XtablesVariant, chains: Sequence[ListedChain], saved: SavedTables, wait: float = DEFAULT_WAIT
) -> list[ListedChain]:
    """Return the chains with every rule and jump as iptables-save prints it; one declared may become several.

    ``saved``: the node's current tables, for external chains that are referred to. ``wait``: seconds to wait for the
    xtables lock where even a trial needs it. Raises KernelError for a rule that iptables refuses.
    """
    declared = [item for chain in chains for item in (*_rules_of(chain), *_jumps_of(chain))]
    tried = [item for item in declared if not _UNTRIED.search(item.rule)]
    printed = _printed(variant, chains, tried, saved, wait)

    def texts(item: _Declared) -> Rules:
        if item not in printed:
            return _derived(item.rule, variant.family)
        return tuple(comparable(rule, variant.family) for rule in printed[item])

    result = []
    for chain in chains:
        jumps = None
        if chain.jumps is not None:
            pairs = zip(chain.jumps, _jumps_of(chain))
            jumps = tuple(jump._replace(condition=text) for jump, item in pairs for text in texts(item))
        rules = tuple(text for item in _rules_of(chain) for text in texts(item))
        result.append(chain._replace(rules=rules, jumps=jumps))
    return result
