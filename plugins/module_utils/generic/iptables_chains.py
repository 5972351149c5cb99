# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""User-declared chains, complete, with the jumps into them; independent of Kubernetes.

A rule can be written in many ways, and only iptables knows how it will print one. So the declared rules are first
loaded into a separate, empty network namespace and printed from there: every mistake shows before the node is changed,
and the current rules can be compared with the declared ones text by text.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import subprocess
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from ..errors import ConfigurationError, KernelError
from ..kernel.programs import Completed
from ..kernel.xtables.chains import SavedTables, parse_save
from ..kernel.xtables.restore import DEFAULT_WAIT, explain, restore, save
from ..kernel.xtables.variant import XtablesVariant
from ..rendering.iptables.canonical import canonical_rule, target_of
from ..rendering.iptables.restore_input import one_line, transaction
from ..rendering.iptables.tables import ChainKey, JumpKey
from ..resources import Change, Kind, Resource

TABLES = ("raw", "mangle", "nat", "filter", "security")
_BUILTIN: Mapping[str, Tuple[str, ...]] = {
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
_COMMANDS = frozenset(
    (
        *("-A", "-C", "-D", "-E", "-F", "-I", "-L", "-N", "-P", "-R", "-S", "-X", "-Z", "-t", "-c", "-4", "-6", "-M"),
        *(
            "--append",
            "--check",
            "--delete",
            "--rename-chain",
            "--flush",
            "--insert",
            "--list",
            "--new-chain",
            "--policy",
        ),
        *("--replace", "--list-rules", "--delete-chain", "--zero", "--table", "--modprobe", "--set-counters"),
        *("--ipv4", "--ipv6"),
    )
)
# These options refer to objects that the empty namespace does not have.
_ELSEWHERE = re.compile(r"--match-set |--nfacct-name |(?:-j|--jump) SET |--object-pinned ")
_BARE = re.compile(r"[^\s\"'\\]+\Z")
_CLONE_NEWNET = 0x40000000

FIRST = "first"
LAST = "last"

Key = Union[ChainKey, JumpKey]
Value = Union[Tuple[str, ...], int]
Table = Dict[Key, Value]


class Jump(NamedTuple):
    """A rule in chain ``origin`` that jumps to a listed chain; ``condition`` is the part before ``-j``.

    ``position``: FIRST or LAST, where the rule is inserted if it does not exist.
    """

    origin: str
    condition: str = ""
    position: str = FIRST


class ListedChain(NamedTuple):
    """A user-declared chain. With ``jumps`` None, jumps into the chain are not managed."""

    table: str
    name: str
    rules: Tuple[str, ...] = ()
    jumps: Optional[Tuple[Jump, ...]] = None


def validate(chains: Sequence[ListedChain]) -> None:
    """Raise ConfigurationError for the first invalid table, chain, rule or jump."""
    listed = {(chain.table, chain.name) for chain in chains}
    seen: Set[Tuple[str, str]] = set()
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


def _words(where: str, rule: str) -> List[str]:
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


def _jump_text(chain: ListedChain, jump: Jump) -> str:
    return f"{jump.condition.strip()} -j {chain.name}".strip()


def _section(lines: Mapping[str, List[str]]) -> str:
    ordered = [table for table in TABLES if lines.get(table)]
    return "".join(transaction(table, (), map(one_line, lines[table])) for table in ordered)


def _in_restorable_text(chain: ListedChain) -> ListedChain:
    jumps = chain.jumps
    if jumps is not None:
        jumps = tuple(jump._replace(condition=_restorable(jump.condition)) for jump in jumps)
    return chain._replace(rules=tuple(_restorable(rule) for rule in chain.rules), jumps=jumps)


# -- canonical texts ---------------------------------------------------------------------------------------------------


def _unshare() -> None:
    """Enter an empty network namespace; runs in the child before the program starts."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def _printed_elsewhere(variant: XtablesVariant, text: str) -> Optional[str]:
    """Return what iptables-save prints after ``text`` was restored in an empty namespace.

    None without the right to create a namespace. Raises KernelError naming the line that iptables refuses.
    """
    wait = "-w 5" if variant.restore_waits else ""
    script = f'"$1" {wait} --noflush && exec "$2"'
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", script, "sh", variant.restore, variant.save],
            input=text.encode(),
            capture_output=True,
            env={**os.environ, "LC_ALL": "C", "LANG": "C"},
            preexec_fn=_unshare,
            check=False,
        )
    except subprocess.SubprocessError:
        return None
    except OSError as error:
        raise KernelError(f"/bin/sh: cannot be run: {error.strerror or error}") from error
    if done.returncode:
        completed = Completed(
            done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        )
        raise KernelError(explain(variant, text, completed, DEFAULT_WAIT))
    return done.stdout.decode(errors="replace")


def _external_chains(chains: Sequence[ListedChain], saved: SavedTables) -> Set[Tuple[str, str]]:
    """Return the external chains that the rules and jumps refer to; the empty namespace needs them."""
    listed = {(chain.table, chain.name) for chain in chains}
    named: Set[Tuple[str, str]] = set()
    for chain in chains:
        named.update((chain.table, target_of(f" {rule}")) for rule in chain.rules)
        named.update((chain.table, jump.origin) for jump in chain.jumps or ())
    return {key for key in named if key in saved.chains and key not in saved.builtin and key not in listed}


def _comparable(rule: str, family: str) -> str:
    return canonical_rule(rule, family) if _ELSEWHERE.search(rule) else rule


def canonical_chains(variant: XtablesVariant, chains: Sequence[ListedChain], saved: SavedTables) -> List[ListedChain]:
    """Return the chains with every rule and jump as iptables-save prints it.

    ``saved``: the node's current tables, for external chains that are referred to. Raises KernelError for a rule that
    iptables refuses.
    """
    lines: Dict[str, List[str]] = {}
    for table, name in sorted(_external_chains(chains, saved)):
        lines.setdefault(table, []).append(f":{name} - [0:0]")
    for chain in chains:
        lines.setdefault(chain.table, []).append(f":{chain.name} - [0:0]")
    for chain in chains:
        body = lines[chain.table]
        body += [f"-A {chain.name} {rule}" for rule in chain.rules if not _ELSEWHERE.search(rule)]
        for jump in chain.jumps or ():
            if not _ELSEWHERE.search(jump.condition):
                body.append(f"-A {jump.origin} {_jump_text(chain, jump)}")
    printed = _printed_elsewhere(variant, _section(lines))
    if printed is None:
        return [_approximately(chain, variant.family) for chain in chains]
    found = {key: iter(rules) for key, rules in parse_save(printed).chains.items()}

    def text(table: str, origin: str, rule: str) -> str:
        return canonical_rule(rule, variant.family) if _ELSEWHERE.search(rule) else next(found[(table, origin)])

    # Rules are printed in the order in which they were added, chain by chain; a listed chain may also be a jump's
    # origin.
    result = []
    for chain in chains:
        rules = tuple(text(chain.table, chain.name, rule) for rule in chain.rules)
        jumps = None
        if chain.jumps is not None:
            jumps = tuple(
                jump._replace(condition=text(chain.table, jump.origin, _jump_text(chain, jump))) for jump in chain.jumps
            )
        result.append(chain._replace(rules=rules, jumps=jumps))
    return result


def _approximately(chain: ListedChain, family: str) -> ListedChain:
    """Return the canonical text that this module can derive without a namespace to test the rules in."""
    jumps = None
    if chain.jumps is not None:
        jumps = tuple(jump._replace(condition=canonical_rule(_jump_text(chain, jump), family)) for jump in chain.jumps)
    return chain._replace(rules=tuple(canonical_rule(rule, family) for rule in chain.rules), jumps=jumps)


# -- resource ----------------------------------------------------------------------------------------------------------


class ListedChainsResource(Resource[Key, Value]):
    """The user-declared chains of one family: ChainKey to its rules, JumpKey to the number of times it occurs.

    Owns the listed chains and, for chains whose jumps are listed, the rules that lead into them from built-in chains
    and from the chains named as origins. ``removal``: the chains are to be removed, with the jumps into them from
    built-in chains.
    """

    kind = Kind.CHAINS
    atomic = True
    diff_by_key = True

    def __init__(
        self, variant: XtablesVariant, chains: Sequence[ListedChain], wait: float = DEFAULT_WAIT, removal: bool = False
    ) -> None:
        validate(chains)
        self.family = variant.family
        self.variant = variant
        self.chains = [_in_restorable_text(chain) for chain in chains]
        self._wait = wait
        self._removal = removal
        self._positions: Dict[JumpKey, str] = {}

    def observe(self) -> Table:
        """Return the listed chains that exist, and the owned jumps. Raises KernelError."""
        return self._owned(parse_save(save(self.variant)))

    def stage(self) -> Tuple[Table, Table]:
        """Return observed and desired table in comparable texts. Raises KernelError if iptables refuses a rule."""
        saved = parse_save(save(self.variant))
        desired: Table = {}
        if self._removal:
            self._refuse_used(saved)
        else:
            self.chains = canonical_chains(self.variant, self.chains, saved)
            for chain in self.chains:
                desired[ChainKey(chain.table, chain.name)] = chain.rules
            for chain in self.chains:
                for jump in chain.jumps or ():
                    key = JumpKey(chain.table, jump.origin, jump.condition)
                    desired[key] = 1
                    self._positions[key] = jump.position
        return self._owned(saved), desired

    def _origins(self, chain: ListedChain, saved: SavedTables) -> Iterable[str]:
        named = {jump.origin for jump in chain.jumps or ()}
        return [
            name
            for table, name in saved.chains
            if table == chain.table and ((table, name) in saved.builtin or name in named) and name != chain.name
        ]

    def _owned(self, saved: SavedTables) -> Table:
        table: Table = {}
        family = self.variant.family
        for chain in self.chains:
            rules = saved.chains.get((chain.table, chain.name))
            if rules is not None:
                table[ChainKey(chain.table, chain.name)] = tuple(_comparable(rule, family) for rule in rules)
            if chain.jumps is None and not self._removal:
                continue
            for origin in self._origins(chain, saved):
                for rule in saved.chains[(chain.table, origin)]:
                    if target_of(rule) == chain.name:
                        key = JumpKey(chain.table, origin, _comparable(rule, family))
                        count = table.get(key, 0)
                        table[key] = (count if isinstance(count, int) else 0) + 1
        return table

    def _refuse_used(self, saved: SavedTables) -> None:
        listed = {(chain.table, chain.name) for chain in self.chains}
        for chain in self.chains:
            origins = set(self._origins(chain, saved))
            for (table, name), rules in saved.chains.items():
                if table != chain.table or name in origins or (table, name) in listed:
                    continue
                rule = next((rule for rule in rules if target_of(rule) == chain.name), None)
                if rule is not None:
                    raise KernelError(
                        f"chain {table} {chain.name}: cannot be removed, chain {name} leads into it: -A {name} {rule}"
                    )

    def apply(self, change: Change[Key, Value]) -> None:
        """Make the whole change in one iptables-restore: all or nothing per table. Raises KernelError."""
        restore(self.variant, self.text(change), self._wait)

    def text(self, change: Change[Key, Value]) -> str:
        """Return the change as input of ``iptables-restore --noflush``."""
        lines: Dict[str, List[str]] = {}
        filled = {**change.added, **{key: new for key, (_old, new) in change.replaced.items()}}
        for key in [*filled, *change.removed]:
            if isinstance(key, ChainKey):
                lines.setdefault(key.table, []).append(f":{key.chain} - [0:0]")
        surplus = {key: (old, 0) for key, old in change.removed.items()}
        for key, (old, new) in {**surplus, **change.replaced}.items():
            if isinstance(key, JumpKey) and isinstance(old, int) and isinstance(new, int):
                lines.setdefault(key.table, []).extend([f"-D {key.chain} {key.rule}"] * (old - new))
        for key, value in filled.items():
            if isinstance(key, ChainKey) and isinstance(value, tuple):
                lines[key.table] += [f"-A {key.chain} {rule}" for rule in value]
        for key in change.added:
            if isinstance(key, JumpKey):
                command = "-A" if self._positions.get(key) == LAST else "-I"
                lines.setdefault(key.table, []).append(f"{command} {key.chain} {key.rule}")
        for key in change.removed:
            if isinstance(key, ChainKey):
                lines[key.table].append(f"-X {key.chain}")
        return _section(lines)

    def describe(self, key: Key, value: Value) -> List[str]:
        """Return the lines as iptables-save prints them."""
        if isinstance(key, JumpKey):
            return [f"-A {key.chain} {key.rule}"] * (value if isinstance(value, int) else 1)
        if isinstance(key, ChainKey) and isinstance(value, tuple):
            return [f":{key.chain} - [0:0]", *(f"-A {key.chain} {rule}" for rule in value)]
        return []
