# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Trace the first packet of a connection through rendered chains, as the kernel would process it.

The tracer parses rule texts itself (the canonicaliser is under test too) and refuses unsupported rules, so that a test
cannot pass because a match was ignored. It follows both branches of random choices; a recent list is empty.
"""

from __future__ import annotations

import ipaddress
import shlex
from typing import Callable, Iterable, Iterator, Mapping, NamedTuple, Optional, Union

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import (
    ChainKey,
    ChainTable,
    JumpKey,
)

REJECT = "REJECT"
DROP = "DROP"
ACCEPT = "ACCEPT"
UNTOUCHED = "-"


class Packet(NamedTuple):
    """The first packet of a connection: it enters the node, or leaves it if its source is an address of the node."""

    source: str
    destination: str
    port: int
    protocol: str = "tcp"
    interface: str = "eth0"


class _State(NamedTuple):
    packet: Packet
    mark: int = 0
    translated: bool = False
    masqueraded: bool = False


class _Rule(NamedTuple):
    tests: tuple[Callable[[_State], Union[bool, None]], ...]
    target: str
    options: Mapping[str, str]


class UnknownRule(Exception):
    """A rule contains a match or target that the tracer does not support."""


def _inverted(test: Callable[[_State], Union[bool, None]], negated: bool) -> Callable[[_State], Union[bool, None]]:
    return (lambda state: not test(state)) if negated else test


class Tracer:
    """Trace packets through a chain table; ``local_addresses`` are those of the node, without loopback.

    ``sets``: the elements of each ipset. ``virtual_server``: protocol number, address and port of the one that has sent
    the packet on, None before IPVS. ``read``: on what outcomes have depended: ``rules`` with table and chain, and
    ``set`` with its name and the element that was looked up, without a network.
    """

    sets: Mapping[str, frozenset[str]] = {}
    virtual_server: Optional[tuple[str, str, str]] = None

    def __init__(self, table: ChainTable, local_addresses: Iterable[str] = ()) -> None:
        self.read: set[tuple[str, str, str]] = set()
        self._local = frozenset(ipaddress.ip_address(address) for address in local_addresses)
        texts: dict[tuple[str, str], list[str]] = {}
        for key, value in table.items():
            if isinstance(key, JumpKey):
                texts.setdefault((key.table, key.chain), []).insert(0, key.rule)
            elif isinstance(key, ChainKey):
                texts[(key.table, key.chain)] = list(value) if isinstance(value, tuple) else []
        self._chains = {chain: [self._rule(rule) for rule in rules] for chain, rules in texts.items()}

    def trace(
        self, source: str, destination: str, port: int, protocol: str = "tcp", interface: str = "eth0"
    ) -> frozenset[str]:
        """Return all possible outcomes: ``ip:port``, with ``+M`` if masqueraded, REJECT, DROP, ACCEPT, ``-``."""
        start = _State(Packet(source, destination, port, protocol, interface))
        return frozenset(self._outcomes(start))

    def _outcomes(self, start: _State) -> Iterator[str]:
        from_node = self._is_local(start.packet.source)
        for verdict, state in self._run("nat", "OUTPUT" if from_node else "PREROUTING", start):
            if verdict in (DROP, REJECT):
                yield verdict
                continue
            to_node = self._is_local(state.packet.destination)
            hooks = (["OUTPUT"] if from_node else []) + (["INPUT"] if to_node else [] if from_node else ["FORWARD"])
            yield from self._filtered(state, hooks, leaves=from_node or not to_node)

    def _filtered(self, state: _State, hooks: list[str], leaves: bool, accepted: bool = False) -> Iterator[str]:
        if hooks:
            for verdict, after in self._run("filter", hooks[0], state):
                if verdict in (DROP, REJECT):
                    yield verdict
                else:
                    yield from self._filtered(after, hooks[1:], leaves, accepted or verdict == ACCEPT)
        elif leaves:
            for _, after in self._run("nat", "POSTROUTING", state):
                yield self._text(after, accepted)
        else:
            yield self._text(state, accepted)

    @staticmethod
    def _text(state: _State, accepted: bool) -> str:
        if not state.translated:
            return ACCEPT if accepted else UNTOUCHED
        packet = state.packet
        host = f"[{packet.destination}]" if ":" in packet.destination else packet.destination
        return f"{host}:{packet.port}{' +M' if state.masqueraded else ''}"

    def _run(self, table: str, chain: str, state: _State) -> Iterator[tuple[str, _State]]:
        """Yield verdicts of a chain with the resulting state; the verdict is empty if the chain ends without one."""
        self.read.add(("rules", table, chain))
        yield from self._from_rule(table, self._chains.get((table, chain), []), 0, state)

    def _from_rule(self, table: str, rules: list[_Rule], index: int, state: _State) -> Iterator[tuple[str, _State]]:
        if index == len(rules):
            yield "", state
            return
        rule = rules[index]
        results = [test(state) for test in rule.tests]
        if False in results:
            yield from self._from_rule(table, rules, index + 1, state)
            return
        if None in results:
            yield from self._from_rule(table, rules, index + 1, state)
        yield from self._matched(table, rules, index, state)

    def _matched(self, table: str, rules: list[_Rule], index: int, state: _State) -> Iterator[tuple[str, _State]]:
        target, options = rules[index].target, rules[index].options
        if target == "":
            yield from self._from_rule(table, rules, index + 1, state)
        elif target == "RETURN":
            yield "", state
        elif target in (ACCEPT, DROP, REJECT):
            yield target, state
        elif target == "MARK":
            value, mask = (int(part, 0) for part in options["--set-xmark"].split("/"))
            marked = state._replace(mark=(state.mark & ~mask & 0xFFFFFFFF) ^ value)
            yield from self._from_rule(table, rules, index + 1, marked)
        elif target == "DNAT":
            address, _, port = options["--to-destination"].rpartition(":")
            packet = state.packet._replace(destination=address.strip("[]"), port=int(port))
            yield ACCEPT, state._replace(packet=packet, translated=True)
        elif target == "MASQUERADE":
            yield ACCEPT, state._replace(masqueraded=True)
        elif (table, target) in self._chains:
            for verdict, after in self._run(table, target, state):
                if verdict:
                    yield verdict, after
                else:
                    yield from self._from_rule(table, rules, index + 1, after)
        else:
            raise UnknownRule(f"target {target} does not exist in table {table}")

    def _is_local(self, address: str) -> bool:
        parsed = ipaddress.ip_address(address)
        return parsed.is_loopback or parsed in self._local

    def _rule(self, text: str) -> _Rule:
        words = shlex.split(text)
        tests: list[Callable[[_State], Union[bool, None]]] = []
        target, options = "", {}
        negated = False
        while words:
            word = words.pop(0)
            if word == "!":
                negated = True
                continue
            if word == "-m":
                words.pop(0)
            elif word == "-j":
                target = words.pop(0)
                while words:
                    name = words.pop(0)
                    options[name] = words.pop(0) if words and not words[0].startswith("--") else ""
            else:
                count = _VALUES.get(word)
                if count is None:
                    raise UnknownRule(f"{word} in {text}")
                values = [words.pop(0) for _ in range(count)]
                if word in _TESTS or word in _OWN_TESTS:
                    tests.append(_inverted(self._test(word, values), negated))
            negated = False
        return _Rule(tuple(tests), target, options)

    def _test(self, word: str, values: list[str]) -> Callable[[_State], Union[bool, None]]:
        if word in ("--src-type", "--dst-type"):
            if values != ["LOCAL"]:
                raise UnknownRule(f"{word} {values}")
            if word == "--src-type":
                return lambda state: self._is_local(state.packet.source)
            return lambda state: self._is_local(state.packet.destination)
        if word == "--match-set":
            return lambda state: self._in_set(values[0], values[1].split(","), state.packet)
        if word in _OF_VIRTUAL_SERVER:
            number = _OF_VIRTUAL_SERVER.index(word)
            return lambda state: self.virtual_server is not None and self.virtual_server[number] == values[0]
        return _TESTS[word](values)

    def _in_set(self, name: str, directions: list[str], packet: Packet) -> bool:
        held = self.sets.get(name, frozenset())
        first, *_port, last = [packet.source if word == "src" else packet.destination for word in directions] * 2
        if len(directions) == 1:
            self.read |= {("set", name, first), ("set", name, str(packet.port))}
            return first in held or str(packet.port) in held
        frontend = f"{first},{packet.protocol}:{packet.port}"
        self.read.add(("set", name, frontend))
        if len(directions) == 2:
            return frontend in held
        networks = (each.rpartition(",")[2] for each in held if each.startswith(f"{frontend},"))
        return any(_in_network(last, network) for network in networks)


def _in_network(address: str, network: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(network)


def _interface(values: list[str]) -> Callable[[_State], bool]:
    name = values[0]
    if name.endswith("+"):
        return lambda state: state.packet.interface.startswith(name[:-1])
    return lambda state: state.packet.interface == name


def _mark(values: list[str]) -> Callable[[_State], bool]:
    value, mask = (int(part, 0) for part in values[0].split("/"))
    return lambda state: state.mark & mask == value


def _state(values: list[str]) -> Callable[[_State], bool]:
    wanted = set(values[0].split(","))
    return lambda state: bool(wanted & ({"NEW", "DNAT"} if state.translated else {"NEW"}))


# Options with values, and the tests among them; a test may return None for "perhaps".
_VALUES = {
    **dict.fromkeys(
        ("--comment", "-s", "-d", "-i", "-p", "--dport", "--mode", "--probability", "--mark", "--ctstate"), 1
    ),
    **dict.fromkeys(("--src-type", "--dst-type", "--name", "--mask", "--seconds", "--nfacct-name"), 1),
    **dict.fromkeys(("--rcheck", "--set", "--reap", "--rsource", "--physdev-is-in"), 0),
    **dict.fromkeys(("--vproto", "--vaddr", "--vport"), 1),
    "--match-set": 2,
}
_OF_VIRTUAL_SERVER = ("--vproto", "--vaddr", "--vport")
_OWN_TESTS = ("--src-type", "--dst-type", "--match-set", *_OF_VIRTUAL_SERVER)
_TESTS: dict[str, Callable[[list[str]], Callable[[_State], Union[bool, None]]]] = {
    "-s": lambda values: lambda state: _in_network(state.packet.source, values[0]),
    "-d": lambda values: lambda state: _in_network(state.packet.destination, values[0]),
    "-i": _interface,
    "-p": lambda values: lambda state: state.packet.protocol == values[0],
    "--dport": lambda values: lambda state: state.packet.port == int(values[0]),
    "--probability": lambda values: lambda state: None if 0 < float(values[0]) < 1 else float(values[0]) >= 1,
    "--mark": _mark,
    "--ctstate": _state,
    "--rcheck": lambda values: lambda state: False,
    "--physdev-is-in": lambda values: lambda state: False,
}
