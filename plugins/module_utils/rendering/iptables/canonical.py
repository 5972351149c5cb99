# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Canonical texts of rules: equal rules have equal texts, whichever program wrote them.

The canonical text is what iptables-save 1.8.9 prints, without ``-A CHAIN``: addresses and interfaces first, then the
protocol, the matches in their order, the target. The rendering writes it directly; other texts are converted here.
Options unknown to this module keep their order and text, so another program's rule merely compares unequal.
"""

from __future__ import annotations

import re
from typing import Callable, Optional

from ...base.addresses import IPV6, address_bits, family_of, packed, parse_network, unpacked
from .rule_parsing import Option, ParsedRule, is_well_quoted, parse_rule, protocol_name, unquoted_target

# Rules as the rendering writes them and both variants print them; tried first, as a node may have 100,000 of them.
_CANONICAL = re.compile(
    r"(?:(?:! )?-s [0-9a-f.:]+/[1-9][0-9]* )?(?:(?:! )?-d [0-9a-f.:]+/[1-9][0-9]* )?(?:(?:! )?-i [^\s\"\\]+ )?"
    r"(?:-p (?:tcp|udp|sctp) )?"
    r"(?:-m conntrack --ctstate [A-Z]+ )?"
    r"(?:-m comment --comment \"[^\"\\']*[ /][^\"\\']*\" )?"
    r"(?:-m addrtype --(?:src|dst)-type LOCAL )?"
    r"(?:-m recent --(?:set|rcheck --seconds [0-9]+ --reap) --name KUBE-[A-Z0-9-]+ --mask [0-9a-f.:]+ --rsource )?"
    r"(?:-m statistic --mode random --probability [01]\.[0-9]{11} )?"
    r"(?:-m (?:tcp|udp|sctp) (?:--dport [0-9]+ )?)?"
    r"-j (?:KUBE-[A-Z0-9-]+|ACCEPT|DROP|RETURN|REJECT --reject-with icmp6?-port-unreachable"
    r"|DNAT --to-destination [^\s\"]+)"
).fullmatch

_PLAIN = re.compile(r"[A-Za-z0-9_-]+").fullmatch
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?").fullmatch
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z0-9-]*").fullmatch
_SAFE = re.compile(r"[^\s\"'\\]+").fullmatch
_PROTOCOL_NUMBERS = {"tcp": "6", "udp": "17", "sctp": "132"}
_STATES = ("INVALID", "NEW", "RELATED", "ESTABLISHED", "UNTRACKED", "SNAT", "DNAT")

_BASE_ORDER = ("-s", "-d", "-i", "-o", "-p", "-f")


def _address(value: str) -> str:
    """Return the canonical address with prefix length; the text itself if it is not an address."""
    base, slash, length = value.partition("/")
    if slash and not length.isdecimal():
        mask = packed(length)
        raw = packed(base)
        if mask is None or raw is None or len(mask) != len(raw):
            return value
        bits = "".join(f"{byte:08b}" for byte in mask)
        prefix = bits.rstrip("0")
        if "0" in prefix:
            return value
        value = f"{base}/{len(prefix)}"
    elif not slash:
        raw = packed(base)
        if raw is None:
            return value
        return f"{unpacked(raw)}/{len(raw) * 8}"
    network = parse_network(value)
    return value if network is None else str(network)


def _hex(value: str) -> str:
    try:
        return f"0x{int(value, 0):x}"
    except ValueError:
        return value


def _mark(value: str) -> str:
    mark, _slash, mask = value.partition("/")
    return _hex(mark) if not mask or _hex(mask) == "0xffffffff" else f"{_hex(mark)}/{_hex(mask)}"


def _rounded(value: str) -> str:
    return f"{round(float(value) * 2**31) / 2**31:.11f}" if _NUMBER(value) else value


def _states(value: str) -> str:
    states = value.upper().split(",")
    return ",".join(state for state in _STATES if state in states) if set(states) <= set(_STATES) else value


def _host(value: str) -> str:
    address = _address(value)
    suffix = f"/{address_bits(family_of(address))}"
    return address[: -len(suffix)] if address.endswith(suffix) else address


#: The canonical form of the value of an option, by match and option.
_VALUES: dict[tuple[str, str], Callable[[str], str]] = {
    ("mark", "--mark"): _mark,
    ("statistic", "--probability"): _rounded,
    ("conntrack", "--ctstate"): _states,
    ("ipvs", "--vproto"): lambda value: _PROTOCOL_NUMBERS.get(value.lower(), value),
    ("ipvs", "--vaddr"): _host,
}


def _canonical_option(match: str, option: Option) -> Option:
    form = _VALUES.get((match, option.name))
    if form is None or not option.values:
        return option
    return option._replace(values=(form(option.values[0]), *option.values[1:]))


def _mark_target(options: list[Option], family: str) -> list[Option]:
    if len(options) != 1 or len(options[0].values) != 1:
        return options
    name, value = options[0].name, options[0].values[0]
    first, _slash, second = value.partition("/")
    try:
        number, mask = int(first, 0), int(second, 0) if second else 0xFFFFFFFF
    except ValueError:
        return options
    if name == "--or-mark":
        pair = (number, number)
    elif name == "--xor-mark":
        pair = (number, 0)
    elif name == "--and-mark":
        pair = (0, ~number & 0xFFFFFFFF)
    elif name == "--set-mark":
        pair = (number, number | mask)
    elif name == "--set-xmark":
        pair = (number, mask)
    else:
        return options
    return [Option(False, "--set-xmark", (f"0x{pair[0]:x}/0x{pair[1]:x}",))]


def _ordered(options: list[Option], order: tuple[str, ...]) -> list[Option]:
    return sorted(options, key=lambda option: order.index(option.name) if option.name in order else len(order))


def _tcp(options: list[Option], family: str) -> list[Option]:
    flags = Option(False, "--tcp-flags", ("FIN,SYN,RST,ACK", "SYN"))
    expanded = [flags._replace(negated=option.negated) if option.name == "--syn" else option for option in options]
    return _ordered(expanded, ("--sport", "--dport", "--tcp-option", "--tcp-flags"))


_RECENT_ORDER = (
    "--set",
    "--rcheck",
    "--update",
    "--remove",
    "--seconds",
    "--hitcount",
    "--reap",
    "--rttl",
    "--name",
    "--mask",
)


def _recent(options: list[Option], family: str) -> list[Option]:
    names = {option.name for option in options}
    mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff" if family == IPV6 else "255.255.255.255"
    defaults = []
    if "--name" not in names:
        defaults.append(Option(False, "--name", ("DEFAULT",)))
    if "--mask" not in names:
        defaults.append(Option(False, "--mask", (mask,)))
    if not names & {"--rsource", "--rdest"}:
        defaults.append(Option(False, "--rsource", ()))
    return _ordered([*options, *defaults], _RECENT_ORDER)


def _ipvs(options: list[Option], family: str) -> list[Option]:
    return _ordered(options, ("--ipvs", "--vproto", "--vaddr", "--vport"))


def _reject(options: list[Option], family: str) -> list[Option]:
    if options:
        return options
    return [Option(False, "--reject-with", ("icmp6-port-unreachable" if family == IPV6 else "icmp-port-unreachable",))]


Normaliser = Callable[[list[Option], str], list[Option]]
_MATCHES: dict[str, Normaliser] = {"recent": _recent, "ipvs": _ipvs, "tcp": _tcp}
_TARGETS: dict[str, Normaliser] = {"MARK": _mark_target, "REJECT": _reject}


def _quoted(value: str, plain: Callable[[str], Optional[re.Match[str]]]) -> str:
    if plain(value):
        return value
    return '"' + re.sub(r"([\"'\\])", r"\\\1", value) + '"'


def _section_words(name: str, options: list[Option]) -> list[str]:
    words = []
    plain = _PLAIN if name == "comment" else _SAFE
    for option in options:
        words += ["!"] if option.negated else []
        words.append(option.name)
        words += [_quoted(value, plain) for value in option.values]
    return words


def _understood(rule: str, parsed: ParsedRule) -> bool:
    """Return whether a rule consists of options with plausible names, in matches and a target that have names.

    A rule that iptables would refuse must not become one that it accepts: that would be a broader rule.
    """
    if not parsed.complete or not is_well_quoted(rule):
        return False
    if any(not value or value[0] in "!-" for name, (_negated, value) in parsed.base.items() if name != "-f"):
        return False
    sections = [*parsed.matches, *([parsed.target] if parsed.target[0] else [])]
    options = [option for _name, section in sections for option in section]
    values = [value for option in options for value in option.values]
    return (
        all(_PLAIN(name) for name, _options in sections)
        and all(_OPTION(option.name) for option in options)
        and not any(value[:1] == "!" or value[:1] == "-" for value in values)
    )


def canonical_rule(rule: str, family: str) -> str:
    """Return the canonical text of a rule (without ``-A CHAIN``) of the family, IPv4 or IPv6.

    Equal results mean the same rule; texts that cannot be parsed as a whole are returned unchanged.
    """
    if _CANONICAL(rule):
        return rule
    parsed = parse_rule(rule)
    if not _understood(rule, parsed):
        return rule
    words: list[str] = []
    for name in _BASE_ORDER:
        if name not in parsed.base:
            continue
        negated, value = parsed.base[name]
        if name in ("-s", "-d"):
            value = _address(value)
            if value == ("::/0" if family == IPV6 else "0.0.0.0/0") and not negated:
                continue
        elif name == "-p":
            value = protocol_name(value)
            if value in ("all", "0") and not negated:
                continue
        elif value == "+" and not negated:
            continue
        words += ["!"] if negated else []
        words += [name, _quoted(value, _SAFE)] if value else [name]
    for name, options in parsed.matches:
        options = [_canonical_option(name, option) for option in options]
        normalise = _MATCHES.get(name)
        words += ["-m", name, *_section_words(name, normalise(options, family) if normalise else options)]
    name, options = parsed.target
    if name:
        normalise = _TARGETS.get(name)
        words += [
            "-g" if parsed.goto else "-j",
            name,
            *_section_words(name, normalise(options, family) if normalise else options),
        ]
    return " ".join(words)


def target_of(rule: str) -> str:
    """Return the chain or target of a rule, from its canonical or iptables-save text; empty if there is none."""
    position = max(rule.rfind(" -j "), rule.rfind(" -g "))
    if position < 0 and rule[:3] not in ("-j ", "-g "):
        return ""
    # Only where a quote follows can the option be part of a quoted text: nearly all of 100,000 rules are not split.
    if position >= 0 and (rule.find('"', position) >= 0 or rule.find("'", position) >= 0):
        return unquoted_target(rule)
    return rule[position + 4 if position >= 0 else 3 :].split(" ", 1)[0]
