# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state that a proxy programmed, as text for readers; it is never compared."""

from __future__ import annotations

import re
from collections.abc import Callable

_IPTABLES = tuple(
    f"{program} -t {table}" for program in ("iptables-save", "ip6tables-save") for table in ("nat", "filter")
)
_COMMANDS = {
    "iptables": _IPTABLES,
    "nftables": ("nft list ruleset",),
    "ipvs": (*_IPTABLES, "ipvsadm -Sn", "ipvsadm -Ln", "ipset save", "ip -o addr show dev kube-ipvs0"),
    "userspace": ("ip -o addr show dev kube-userspace0", "ss -Hltun"),
}
_CONSTANT = (
    (re.compile(r"\[\d+:\d+\]"), "[0:0]"),
    (re.compile(r"counter packets \d+ bytes \d+"), "counter packets 0 bytes 0"),
    (re.compile(r"bucketsize (\d+) initval 0x[0-9a-f]+"), r"bucketsize \1"),
)
_LEFT_OUT = re.compile(r"^(# |(-A|:)CNI)")


def programmed(mode: str, title: str, output_of: Callable[[str], str]) -> list[str]:
    """Return one block of text for each command of the mode, under the *title*, with the counters zeroed."""
    return [f"### {title}: {command}\n{_constant(output_of(command))}\n" for command in _COMMANDS[mode]]


def _constant(text: str) -> str:
    for pattern, replacement in _CONSTANT:
        text = pattern.sub(replacement, text)
    return "\n".join(line for line in text.splitlines() if not _LEFT_OUT.match(line)).strip()
