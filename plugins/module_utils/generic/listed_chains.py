# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Chains as the user declares them, and their validation."""

from __future__ import annotations

import re
import shlex
from typing import Iterator, Mapping, NamedTuple, Optional, Sequence

from ..base.errors import ConfigurationError
from ..rendering.iptables.canonical import target_of
from ..rendering.iptables.restore_input import one_line, transaction
from ..rendering.iptables.rule_parsing import parse_rule

TABLES = ("raw", "mangle", "nat", "filter", "security")
_BUILTIN: Mapping[str, tuple[str, ...]] = {
    "raw": ("PREROUTING", "OUTPUT"),
    "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
    "security": ("INPUT", "FORWARD", "OUTPUT"),
}
_RESERVED = frozenset(
    (
        *(chain for chains in _BUILTIN.values() for chain in chains),
        *("ACCEPT", "DROP", "RETURN", "QUEUE", "REJECT", "LOG", "MARK", "DNAT", "SNAT", "MASQUERADE", "REDIRECT"),
    )
)
_CHAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,27}\Z")
_COMMAND_WORDS = """-A -C -D -E -F -I -L -N -P -R -S -X -Z -t -c -4 -6 -M --append --check --delete --rename-chain
    --flush --insert --list --new-chain --policy --replace --list-rules --delete-chain --zero --table --modprobe
    --set-counters --ipv4 --ipv6"""
_COMMANDS = frozenset(_COMMAND_WORDS.split())
_BARE = re.compile(r"[^\s\"'\\]+\Z")
#: What iptables takes for an IPv4 address, in short forms and with hexadecimal parts.
_NUMBERS = re.compile(r"(?:0x[0-9a-f]+|[0-9]+)(?:\.(?:0x[0-9a-f]+|[0-9]+))*\Z", re.IGNORECASE)

ANY = "any"
FIRST = "first"
LAST = "last"


class Jump(NamedTuple):
    """A rule in chain ``origin`` that jumps to a listed chain; ``condition`` is the part before ``-j``.

    ``position``: FIRST or LAST, where in its chain the rule must be; ANY if it may be anywhere.
    """

    origin: str
    condition: str = ""
    position: str = ANY


class ListedChain(NamedTuple):
    """A user-declared chain. With ``jumps`` None, jumps into the chain are not managed."""

    table: str
    name: str
    rules: tuple[str, ...] = ()
    jumps: Optional[tuple[Jump, ...]] = None


def validate(chains: Sequence[ListedChain]) -> None:
    """Raise ConfigurationError for the first invalid table, chain, rule or jump."""
    listed = {(chain.table, chain.name) for chain in chains}
    seen: set[tuple[str, str]] = set()
    for chain in chains:
        where = f"chain {chain.table} {chain.name}"
        if chain.table not in _BUILTIN:
            raise ConfigurationError(f"{where}: table is not one of {', '.join(TABLES)}")
        if not _CHAIN.match(chain.name):
            raise ConfigurationError(f"chain {chain.name!r}: not a chain name (up to 28 letters, digits and _.:@+-)")
        if chain.name in _RESERVED:
            raise ConfigurationError(f"{where}: is the name of a built-in chain or target, which cannot be managed")
        if (chain.table, chain.name) in seen:
            raise ConfigurationError(f"{where}: given twice")
        seen.add((chain.table, chain.name))
        for number, rule in enumerate(chain.rules):
            if not rule:
                raise ConfigurationError(f"{where}: rules[{number}]: is empty; leave it out")
            _validate_rule(f"{where}: rules[{number}]", rule)
        for number, jump in enumerate(chain.jumps or ()):
            if not _CHAIN.match(jump.origin):
                raise ConfigurationError(f"{where}: jumps[{number}].from: {jump.origin!r} is not a chain name")
            if (chain.table, jump.origin) in listed:
                raise ConfigurationError(
                    f"{where}: jumps[{number}].from: {jump.origin} is listed too: put it in its rules"
                )
            _validate_rule(f"{where}: jumps[{number}].match", jump.condition)
            if target_of(f" {jump.condition}"):
                raise ConfigurationError(
                    f"{where}: jumps[{number}].match: holds a target; the chain itself is the target"
                )


def _validate_rule(where: str, rule: str) -> None:
    if any(ord(character) < 32 or ord(character) == 127 for character in rule):
        raise ConfigurationError(f"{where}: holds a line break or another control character")
    command = next((word for word in _words(where, rule) if word in _COMMANDS), None)
    if command is not None:
        raise ConfigurationError(f"{where}: {command}: give the rule only, without a command of iptables")
    for name in _host_names(rule):
        raise ConfigurationError(f"{where}: {name}: give an address; a host name would be resolved only once")


def _host_names(rule: str) -> Iterator[str]:
    """Yield the names among the addresses of a rule.

    The rule would hold the addresses of the day on which it was loaded, and its trial cannot ask a name server.
    """
    base = parse_rule(rule).base
    for option in ("-s", "-d"):
        _negated, value = base.get(option, (False, ""))
        for address in value.split(","):
            host = address.partition("/")[0].strip()
            if host and ":" not in host and not _NUMBERS.match(host):
                yield host


def _words(where: str, rule: str) -> list[str]:
    try:
        return shlex.split(rule)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {str(error).lower()}: {rule}") from error


def _restorable(rule: str) -> str:
    """Return the rule with double quotes, the only ones that iptables-restore supports."""
    words = []
    for word in _words("rule", rule):
        if not _BARE.match(word):
            word = '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
        words.append(word)
    return " ".join(words)


def jump_text(chain: ListedChain, jump: Jump) -> str:
    """Return the rule of a jump, without its chain."""
    return f"{jump.condition.strip()} -j {chain.name}".strip()


def section(lines: Mapping[str, list[str]]) -> str:
    """Return lines by table as input of iptables-restore, one transaction per table."""
    ordered = [table for table in TABLES if lines.get(table)]
    return "".join(transaction(table, (), map(one_line, lines[table])) for table in ordered)


def in_restorable_text(chain: ListedChain) -> ListedChain:
    """Return the chain with rules and conditions that iptables-restore parses as a shell would."""
    jumps = chain.jumps
    if jumps is not None:
        jumps = tuple(jump._replace(condition=_restorable(jump.condition)) for jump in jumps)
    return chain._replace(rules=tuple(_restorable(rule) for rule in chain.rules), jumps=jumps)
