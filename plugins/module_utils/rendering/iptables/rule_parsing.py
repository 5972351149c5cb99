# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parse the text of a rule into its base, matches and target, whichever program wrote it."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"|\'([^\']*)\'|((?:[^\s"\'\\]|\\.)+)')
_ESCAPED = re.compile(r"\\(.)")
_PROTOCOLS = {"6": "tcp", "17": "udp", "132": "sctp", "1": "icmp", "58": "ipv6-icmp", "icmpv6": "ipv6-icmp"}
_PORT_MATCHES = ("tcp", "udp", "sctp", "dccp", "udplite")
#: The match that iptables adds by itself for options that follow ``-p``, by protocol.
_IMPLIED = {
    **{name: name for name in (*_PORT_MATCHES, "icmp", "ah", "esp", "ipcomp")},
    "ipv6-icmp": "icmp6",
    "ipv6-mh": "mh",
}

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
    "-f": "-f",
    "--fragment": "-f",
    "--fragments": "-f",
}
_PORT_OPTIONS = {
    "--destination-port": "--dport",
    "--source-port": "--sport",
    "--dport": "--dport",
    "--sport": "--sport",
}
#: Other options of a protocol's match, which can stand behind another match, by the matches that have them.
_PROTOCOL_OPTIONS = {
    **dict.fromkeys(("--syn", "--tcp-flags", "--tcp-option"), ("tcp",)),
    "--icmp-type": ("icmp",),
    "--icmpv6-type": ("icmp6",),
}
#: Options with exactly one value, which is free text and can look like an option.
_TEXT_OPTIONS = ("--comment", "--log-prefix", "--nflog-prefix", "--string", "--hex-string")


class Option(NamedTuple):
    """One option of a match or target: its name, whether a ``!`` precedes it, and its values."""

    negated: bool
    name: str
    values: tuple[str, ...]


class ParsedRule(NamedTuple):
    """A parsed rule. ``base`` maps -s, -d, -i, -o, -p and -f to (negated, value); -f has no value.

    ``matches`` and ``target`` are (name, options), the target's name empty where there is none. ``goto``: -g, not -j.
    ``complete``: whether the other fields hold every word of the rule. If not, they are another rule.
    """

    base: dict[str, tuple[bool, str]]
    matches: list[tuple[str, list[Option]]]
    target: tuple[str, list[Option]]
    goto: bool = False
    complete: bool = True


def tokens_of(rule: str) -> list[str]:
    """Split a rule into words and remove quotes."""
    words: list[str] = []
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
    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.base: dict[str, tuple[bool, str]] = {}
        self.matches: list[tuple[str, list[Option]]] = []
        self.target: tuple[str, list[Option]] = ("", [])
        self.goto = False
        self.complete = True
        #: Where options belong that no other rule assigns; None before the first match or target.
        self.section: Optional[list[Option]] = None

    def parse(self) -> ParsedRule:
        position, negated = 0, False
        while position < len(self.words):
            word = self.words[position]
            position += 1
            if word == "!":
                self.complete = self.complete and not negated
                negated = True
                continue
            end = self._end_of_values(word, position)
            values = self.words[position:end]
            position = end
            if values[:1] == ["!"] and len(values) > 1:
                self.complete = self.complete and not negated
                negated, values = True, values[1:]
            self._option(negated, word, values)
            negated = False
        return ParsedRule(self.base, self.matches, self.target, self.goto, self.complete and not negated)

    def _end_of_values(self, name: str, position: int) -> int:
        """Return the position behind the values of an option whose first value would be at ``position``."""
        end = min(position + 1, len(self.words)) if name in _TEXT_OPTIONS else position
        while end < len(self.words) and not self._is_option(end):
            end += 1
        return end

    def _is_option(self, position: int) -> bool:
        word = self.words[position]
        if word == "!":
            following = self.words[position + 1] if position + 1 < len(self.words) else ""
            return following.startswith("-")
        return word.startswith("-") and len(word) > 1 and not word[1].isdigit()

    def _option(self, negated: bool, name: str, values: list[str]) -> None:
        if name in ("-m", "--match"):
            self.section = []
            self.matches.append((self._only(negated, values), self.section))
        elif name in ("-j", "--jump", "-g", "--goto"):
            self.complete = self.complete and not self.target[0]
            self.goto = name in ("-g", "--goto")
            self.section = []
            self.target = (self._only(negated, values), self.section)
        elif name in _BASE and not (name == "--proto" and self._match_of(("policy",)) is not None):
            self._base(negated, _BASE[name], values)
        else:
            self._of_extension(Option(negated, _PORT_OPTIONS.get(name, name), tuple(values)))

    def _only(self, negated: bool, values: list[str]) -> str:
        """Return the name of a match or target, which has no further values and no ``!``."""
        self.complete = self.complete and not negated and len(values) == 1
        return values[0] if values else ""

    def _base(self, negated: bool, name: str, values: list[str]) -> None:
        """Keep a base option, which iptables takes once, with one value; -f with none."""
        self.complete = self.complete and name not in self.base and len(values) == (0 if name == "-f" else 1)
        self.base[name] = (negated, values[0] if values else "")

    def _of_extension(self, option: Option) -> None:
        """Keep an option of a match or target: in the one that must have it, or else in the last one that was named."""
        owners = _PORT_MATCHES if option.name in _PORT_OPTIONS else _PROTOCOL_OPTIONS.get(option.name, ())
        section = self._match_of(owners)
        if section is None and (owners or self.section is None):
            section = self._implied_match(owners)
        if section is None:
            section = self.section
        if section is None:
            self.complete = False
        else:
            section.append(option)

    def _match_of(self, names: tuple[str, ...]) -> Optional[list[Option]]:
        """Return the options of the last match that has one of the names."""
        return next((options for name, options in reversed(self.matches) if name in names), None)

    def _implied_match(self, owners: tuple[str, ...]) -> Optional[list[Option]]:
        """Return the options of the match that the protocol implies: one of ``owners``, if there are any."""
        negated, protocol = self.base.get("-p", (False, ""))
        name = "" if negated else _IMPLIED.get(protocol_name(protocol), "")
        if not name or (owners and name not in owners):
            return None
        implied = self._match_of((name,))
        if implied is None:
            implied = []
            self.matches.append((name, implied))
        return implied


def parse_rule(rule: str) -> ParsedRule:
    """Parse the text of a rule, whatever the order of its options."""
    return _Parser(tokens_of(rule)).parse()
