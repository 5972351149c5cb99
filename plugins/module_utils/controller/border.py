# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The border to Ansible: how text and names of a cluster or a node are passed on, so that Ansible evaluates neither.

ansible-core marks what modules return, and the inventory plugin what it reads, as data that is never a template.
ansible-rulebook has no such mark, so :func:`harmless` changes the text itself. What ansible-rulebook renders, it reads
as a literal of Python, decrypts with ansible-vault, and writes into a playbook, where it is a template.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
from typing import Any, Match

# Text that is evaluated as it stands: the delimiters of Jinja; the header that sets others, which counts at the start
# of a text, where a rulebook may have its first character, and a filter change its case; and the header of Ansible
# Vault. A brace at the end would make a delimiter with the text that follows.
_EVALUATED = (
    (re.compile(r"\{(?=[{%#]|\Z)"), "{ "),
    (re.compile(r"((?:\A|#)jinja2):", re.IGNORECASE), r"\1 :"),
    (re.compile(r"((?:\A|\$)ANSIBLE_)VAULT", re.IGNORECASE), r"\1 VAULT"),
)
# What a reader of Python literals joins: a continued line, and strings one after the other with comments between them.
_JOINT = re.compile(
    r"""\\\r?\n | (?<!\\)\\*['"](?:[\s\\'"] | (?<=\\)[nrtfv] | \#[^\r\n]*[\r\n] | (?<!\\)[bru]{1,2}(?=['"]))*['"]""",
    re.IGNORECASE | re.VERBOSE,
)
_ESCAPE = re.compile(r"(?<!\\)\\+(?:[xX]([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3}))")
# What is evaluated once it is read: an escape that another one has made, or one by name; and at the end the beginning
# of an escape, a delimiter or a header, which the text that follows may complete.
_REREAD = re.compile(_ESCAPE.pattern + r"|\\N\{")
_BEGUN = re.compile(
    r"""\\(?:[xXuUN][0-9a-fA-F]*|[0-7]{1,2})?\Z
    | \{['"][\s\\'"]*\Z
    | (?:\A|['"])(?:[\s\ufeff]|\\+[nrtfv])*\#(?:j(?:i(?:n(?:j(?:a2?)?)?)?)?)?[\s\\'"]*\Z
    | \$A[A-Z_]*[\s\\'"]*\Z""",
    re.VERBOSE,
)
_LOOSE = re.compile(r"[{#$\\](?! )")
# Longer than any text of an agent's Event, though not of a core Event; reading it would take long.
_MOST_CHARACTERS = 2_000

#: Names that resolve to the host itself.
_CONTROLLER = re.compile(r"(?:.*\.)?localhost(?:\.localdomain|[46](?:\.localdomain[46])?)?|ip6-(?:localhost|loopback)")
#: Groups of every inventory, and groups of the inventory plugin that do not depend on labels.
GROUPS_OF_ANSIBLE, GROUPS_OF_NODES = ("all", "ungrouped", "_meta"), ("ready", "not_ready", "unschedulable")


def harmless(text: str) -> str:
    """Return a text that neither Ansible nor ansible-rulebook evaluates, alone or beside others like it.

    A text that they would evaluate stays readable: it gets spaces. Any other is returned unchanged.
    """
    for form, broken in _EVALUATED:
        text = form.sub(broken, text)
    if len(text) > _MOST_CHARACTERS or _is_evaluated_when_read(text):
        text = _LOOSE.sub(r"\g<0> ", text)
    return text


def _is_evaluated_when_read(text: str) -> bool:
    """Return whether a literal of Python that is made of the text, or of it and others, could be evaluated."""
    decoded = _ESCAPE.sub(_decoded, text)
    readings = (text, decoded, _JOINT.sub("", decoded))
    forms = (_BEGUN, *(form for form, _broken in _EVALUATED))
    return bool(_REREAD.search(decoded)) or any(form.search(reading) for reading in readings for form in forms)


def _decoded(match: Match[str]) -> str:
    x, u, long, octal = match.groups()
    code = int(octal, 8) if octal else int(x or u or long, 16)
    return chr(code) if code <= sys.maxunicode else match.group()


def _parsed(name: str) -> Any:
    """Return the address that resolvers take a name for, None if they look it up."""
    try:
        # 127.1 and 0x7f000001 are addresses, too.
        address: Any = ipaddress.ip_address(socket.inet_aton(name))
    except OSError:
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return None
    return getattr(address, "ipv4_mapped", None) or address


def is_controller(name: str) -> bool:
    """Return whether a name or an address leads each host to itself, as ``localhost`` does."""
    address = _parsed(name)
    if address is None:
        return _CONTROLLER.fullmatch(name.lower()) is not None
    return bool(address.is_loopback or address.is_unspecified)


def is_address(name: str) -> bool:
    """Return whether resolvers take a name for an address, which they do not look up."""
    return _parsed(name) is not None


def canonical_host(name: str) -> str:
    """Return a name or an address of a host in one of the spellings with which a resolver finds the same host."""
    return str(_parsed(name) or name.lower())


def other_meaning(name: str) -> str:
    """Return what Ansible takes the name of a Node for other than a host of its own, empty if for nothing.

    The name is a DNS subdomain, so it is no pattern with special characters.
    """
    if name in (*GROUPS_OF_ANSIBLE, *GROUPS_OF_NODES):
        return "the name of a group"
    return "a name of the controller" if is_controller(name) else ""
