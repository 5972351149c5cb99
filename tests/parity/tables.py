# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compare the tables that a kube-proxy programmed with the recorded ones, which are used to test takeovers.

Compared is which rules, elements and servers of the families of a case there are. Their order is not: kube-proxy writes
Services in random order. The other family may be recorded at any time of its first pass, so it is omitted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.conformance.wirelab import sentinel

_SENTINEL = (
    sentinel.NAMESPACE,
    *sentinel.ADDRESS.values(),
    *sentinel.ENDPOINT.values(),
    *sentinel.OTHER_ENDPOINT.values(),
)
_IPTABLES_CHAIN = re.compile(r"KUBE-(?:SEP|SVC|SVL|EXT|FW)-[A-Z0-9]{16}")
_CHAIN_OF_NFTABLES = re.compile(r"^\t((?:chain|map|set) \S+) \{\n(.*?)^\t\}", re.MULTILINE | re.DOTALL)
_ELEMENTS = re.compile(r"elements = \{(.*?)\}\s*\Z", re.DOTALL)
#: Tables and sets of one family alone.
_OF_FAMILY = {
    4: re.compile(r": iptables-save |: table ip |family inet "),
    6: re.compile(r": ip6tables-save |: table ip6 |family inet6 |KUBE-6-"),
}
#: How long an element remains.
_REMAINING = re.compile(r" expires [0-9a-z]+")
#: A real server as ipvsadm -Ln shows it: the weight, and how many connections are active and inactive.
_REAL_SERVER = re.compile(r"(  -> \S+ +\S+ +(\d+)) +\d+ +\d+ *")
#: Kernels may lack nfacct, and then kube-proxy omits the rules that count with it.
_NFACCT = re.compile(r" -m nfacct --nfacct-name +\S+")


def differences(recorded: Path, found: Path, families: Sequence[int]) -> list[str]:
    """Return the lines that only one of two files ``state-MODE.txt`` has: with - recorded ones, with + found ones."""
    others = [mark for family, mark in _OF_FAMILY.items() if family not in families]
    before, now = (
        Counter(
            line for line in _lines(path.read_text(encoding="utf-8")) if not any(mark.search(line) for mark in others)
        )
        for path in (recorded, found)
    )
    return [*(f"- {line}" for line in (before - now).elements()), *(f"+ {line}" for line in (now - before).elements())]


def _lines(text: str) -> Iterable[str]:
    for block in re.split(r"^(?=### )", text, flags=re.MULTILINE):
        title, _, content = block.partition("\n")
        command = title.partition(": ")[2]
        lines = _of_nftables(content) if command.startswith("nft ") else _of_others(content)
        yield from (f"{title.removeprefix('### ')}: {line}" for line in lines)


def _of_nftables(content: str) -> Iterable[str]:
    for table in re.split(r"^(?=table )", content, flags=re.MULTILINE):
        name = table.partition(" {")[0]
        for title, body in _CHAIN_OF_NFTABLES.findall(table):
            elements = _ELEMENTS.search(body)
            head = body[: elements.start()] if elements else body
            parts = [*head.splitlines(), *(elements[1].split(",\n") if elements else ())]
            # An empty chain is one that is about to be removed.
            for part in (title, *parts) if body.strip() else ():
                line = _REMAINING.sub("", " ".join(part.split()))
                if line and not any(word in f"{title} {line}" for word in _SENTINEL):
                    yield f"{name}: {title}: {line}"


def _of_others(content: str) -> Iterable[str]:
    lines = [line for line in content.splitlines() if line.strip() and not _NFACCT.search(line)]
    about = [line for line in lines if any(word in line for word in _SENTINEL)]
    chains = {chain for line in about for chain in _IPTABLES_CHAIN.findall(line)}
    for line in lines:
        if line not in about and not chains & set(_IPTABLES_CHAIN.findall(line)):
            server = _REAL_SERVER.fullmatch(line)
            if server is None:
                yield line
            elif server[2] != "0":
                # One of weight 0 is drained: kube-proxy removes it later, when its connections have ended.
                yield server[1]
