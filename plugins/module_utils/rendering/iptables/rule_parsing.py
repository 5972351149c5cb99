# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parse the text of a rule into its base, matches and target, whichever program wrote it."""

from __future__ import annotations

import re
from typing import Dict, List, NamedTuple, Tuple

_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"|\'([^\']*)\'|((?:[^\s"\'\\]|\\.)+)')
_ESCAPED = re.compile(r"\\(.)")
_PROTOCOLS = {"6": "tcp", "17": "udp", "132": "sctp", "1": "icmp", "58": "ipv6-icmp", "icmpv6": "ipv6-icmp"}
_PORT_MATCHES = ("tcp", "udp", "sctp", "dccp", "udplite")

_BASE = {
    "-s": "-s",
    "--source": "-s",
    "--src": "-s",
    "-d": "-d",
    "--destination": "-d",
    "--dst": "-d",
    "-i": "-i",
    "--in-interface": "-i",
    "-o": "-o",
    "--out-interface": "-o",
    "-p": "-p",
    "--protocol": "-p",
    "--proto": "-p",
}
_PORT_OPTIONS = {
    "--destination-port": "--dport",
    "--source-port": "--sport",
    "--dport": "--dport",
    "--sport": "--sport",
}


class Option(NamedTuple):
    """One option of a match or target: its name, whether a ``!`` precedes it, and its values."""

    negated: bool
    name: str
    values: Tuple[str, ...]


class ParsedRule(NamedTuple):
    """A parsed rule. ``base`` maps -s, -d, -i, -o and -p to (negated, value).

    ``matches`` and ``target`` are (name, options), the target's name empty where there is none. ``goto``: -g, not -j.
    """

    base: Dict[str, Tuple[bool, str]]
    matches: List[Tuple[str, List[Option]]]
    target: Tuple[str, List[Option]]
    goto: bool = False


def tokens_of(rule: str) -> List[str]:
    """Split a rule into words and remove quotes."""
    words: List[str] = []
    for match in _TOKEN.finditer(rule):
        double, single, bare = match.groups()
        if single is not None:
            words.append(single)
        else:
            word = double if double is not None else bare
            words.append(_ESCAPED.sub(r"\1", word) if "\\" in word else word)
    return words


def unquoted_target(rule: str) -> str:
    """Return the value of the last -j or -g that is not part of a quoted text; empty if there is none."""
    target, takes = "", False
    for match in _TOKEN.finditer(rule):
        if takes:
            target = next(group for group in match.groups() if group is not None)
        takes = match.group(3) in ("-j", "-g")
    return target


def is_well_quoted(rule: str) -> bool:
    """Return whether a rule consists of words and quoted strings only, without an unclosed quote."""
    return not _TOKEN.sub("", rule).strip()


def protocol_name(value: str) -> str:
    """Return the name that iptables-save prints for a protocol, given by name or number."""
    value = value.lower()
    return _PROTOCOLS.get(value, value)


class _Parser:
    def __init__(self, words: List[str]) -> None:
        self.words = words
        self.base: Dict[str, Tuple[bool, str]] = {}
        self.matches: List[Tuple[str, List[Option]]] = []
        self.target: Tuple[str, List[Option]] = ("", [])
        self.goto = False
        self.section: List[Option] = self.target[1]

    def parse(self) -> ParsedRule:
        position, negated = 0, False
        while position < len(self.words):
            word = self.words[position]
            position += 1
            if word == "!":
                negated = True
                continue
            values: List[str] = []
            while position < len(self.words) and not self._is_option(position):
                values.append(self.words[position])
                position += 1
            if values[:1] == ["!"]:
                negated, values = not negated, values[1:]
            self._option(negated, word, values)
            negated = False
        return ParsedRule(self.base, self.matches, self.target, self.goto)

    def _is_option(self, position: int) -> bool:
        word = self.words[position]
        if word == "!":
            following = self.words[position + 1] if position + 1 < len(self.words) else ""
            return following.startswith("-")
        return word.startswith("-") and len(word) > 1 and not word[1].isdigit()

    def _option(self, negated: bool, name: str, values: List[str]) -> None:
        value = values[0] if values else ""
        if name in ("-m", "--match"):
            self.section = []
            self.matches.append((value, self.section))
        elif name in ("-j", "--jump", "-g", "--goto"):
            self.goto = name in ("-g", "--goto")
            self.section = []
            self.target = (value, self.section)
        elif name in _BASE and not (name == "-p" and "-p" in self.base):
            self.base[_BASE[name]] = (negated, value)
        elif name in _PORT_OPTIONS:
            self._port_section().append(Option(negated, _PORT_OPTIONS[name], tuple(values)))
        else:
            self.section.append(Option(negated, name, tuple(values)))

    def _port_section(self) -> List[Option]:
        """Return the match to which --dport belongs: the one named before, or the one implied by the protocol."""
        for name, options in reversed(self.matches):
            if name in _PORT_MATCHES:
                return options
        protocol = protocol_name(self.base["-p"][1]) if "-p" in self.base else ""
        if protocol not in _PORT_MATCHES:
            return self.section
        implied: List[Option] = []
        self.matches.append((protocol, implied))
        return implied


def parse_rule(rule: str) -> ParsedRule:
    """Parse the text of a rule, whatever the order of its options."""
    return _Parser(tokens_of(rule)).parse()
