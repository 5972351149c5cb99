# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run iptables-save and iptables-restore, and report a failure in one line, with the offending line of our text."""

from __future__ import annotations

import re

from ...base.errors import KernelError
from ...base.progress import Progress, unheeded
from ..facts import read_text
from ..netlink.protocol import NETLINK_NETFILTER
from ..netlink.socket import NetlinkSocket
from ..nftables.listing import nft_tables
from ..programs import Completed, run
from .lock import XtablesLock, held_message
from .variant import LEGACY, NFT, TABLES, XtablesVariant, run_save

DEFAULT_WAIT = 5.0

_UNPARSED = "Parsing nftables rule failed"
#: The comment of iptables-nft-save about a table with such rules where it does not stop at them.
_INCOMPATIBLE = "# Table `{}' is incompatible, use 'nft' tool.\n"

_LINE = re.compile(r"\bline:? (\d+)(?: failed|:|\s*$)", re.MULTILINE)
_MISSING_EXTENSION = re.compile(r"Extension (\S+) revision \d+ not supported")
_MISSING_LIBRARY = re.compile(r"Couldn't load (match|target) `([^']+)'")
# A name in the words of iptables.
_QUOTED = re.compile(r"['`]([^'`\s]+)'")
_NOISE = re.compile(
    r"Error occurred at line: \d+|Try `[^\n]*? for more information\.|Warning: Extension .*|Another app is .*"
    r"|ip6?tables(?:-legacy|-nft)?-restore(?: v[\d.]+ \([a-z_]+\))?:|line \d+ failed[:.]?|^\s*line \d+:|#.*",
    re.MULTILINE,
)
_MATCH = re.compile(r" -m ([A-Za-z0-9]+)(?= |$)", re.MULTILINE)
_TARGET = re.compile(r" -j (DNAT|SNAT|MASQUERADE|MARK|REJECT|CONNMARK|REDIRECT|LOG|CT|TPROXY)(?= |$)", re.MULTILINE)


class RestoreError(KernelError):
    """iptables-restore has refused a text, or could not acquire the lock."""


def _known_extensions(family: str) -> set[str]:
    prefix = "ip6" if family == "IPv6" else "ip"
    lists = [read_text(f"/proc/net/{prefix}_tables_{kind}") for kind in ("matches", "targets")]
    return set() if None in lists else {name for text in lists for name in (text or "").split()}


def missing_extensions(variant: XtablesVariant, text: str) -> list[str]:
    """Return extensions of a restore text that the kernel has not registered; always empty for the nft variant."""
    known = _known_extensions(variant.family)
    if variant.name != LEGACY or not known:
        return []
    # Matches and targets, not chains, as /proc/net/ip_tables_* names them.
    return sorted({*_MATCH.findall(text), *_TARGET.findall(text)} - known)


def failure_line(variant: XtablesVariant, text: str, done: Completed, wait: float) -> str:
    """Return one line for a failed restore: the lock or extension that is the cause, or the line of ``text``."""
    program = variant.restore.rsplit("/", 1)[-1]
    output = f"{done.output}\n{done.errors}"
    if done.status == 4 and "xtables lock" in output:
        return f"{program}: {held_message(wait)}"
    lines = text.split("\n")
    numbers = [int(number) for number in _LINE.findall(output)]
    number = next((number for number in numbers if 1 <= number <= len(lines)), 0)
    line = lines[number - 1] if number else ""
    reason = "; ".join(_reasons(variant, text, output, line))
    return f"{program}: {reason or f'refused by the kernel (exit status {done.status})'}{_where(lines, number, reason)}"


def _reasons(variant: XtablesVariant, text: str, output: str, line: str) -> list[str]:
    """Return the reasons in the output of a failed restore, or those that follow from the line that failed."""
    missing = sorted(set(_MISSING_EXTENSION.findall(output)))
    libraries = _MISSING_LIBRARY.findall(output)
    if line == "COMMIT" and not missing:
        missing = missing_extensions(variant, text)
    if missing or libraries:
        return [f"the kernel lacks the extension {name}" for name in missing] + [
            f"there is no chain {name}" if name.startswith("KUBE-") else f"there is no {kind} extension {name}"
            for kind, name in libraries
        ]
    said = " ".join(_NOISE.sub(" ", output).split()).strip(" :")
    if said:
        return [said]
    if line.startswith("-X "):
        return ["the chain is still used by a rule of another program, or does not exist"]
    return ["the rule does not exist any more"] if line.startswith("-D ") else []


def _where(lines: list[str], number: int, reason: str) -> str:
    """Return the failed line of the text, in parentheses.

    A failed COMMIT means its whole table: iptables-nft looks for chains and sets only then. If the reason quotes one,
    this is the first rule that names it.
    """
    if not number:
        return ""
    line = lines[number - 1]
    if line == "COMMIT":
        start = next((place for place in range(number - 1, -1, -1) if lines[place].startswith("*")), 0)
        quoted = set(_QUOTED.findall(reason))
        for rule in lines[start:number]:
            if rule.startswith("-") and not quoted.isdisjoint(rule.split()):
                return f" (rule {_shortened(rule)})"
        return f" (line {number}: COMMIT of table {lines[start][1:]})"
    return f" (line {number}: {_shortened(line)})"


def _shortened(line: str) -> str:
    return line if len(line) <= 300 else line[:297] + "..."


def restore(variant: XtablesVariant, text: str, progress: Progress = unheeded, wait: float = DEFAULT_WAIT) -> int:
    """Apply a restore text in one call, without flushing chains that it does not name; an empty text does nothing.

    ``wait``: seconds to wait for the xtables lock. Returns the number of the restore process (0 if there was nothing to
    do). Raises RestoreError; a table whose part failed is unchanged.
    """
    if not text:
        return 0
    command = [variant.restore, "--noflush", "--counters"]
    if variant.restore_waits:
        done = run([*command, "-w", f"{max(1, round(wait))}"], text, progress=progress)
    else:
        with XtablesLock(wait):
            done = run(command, text, progress=progress)
    if done.status:
        raise RestoreError(failure_line(variant, text, done, wait))
    return done.process


def save(variant: XtablesVariant, progress: Progress = unheeded) -> str:
    """Return the text of all tables that exist, without creating any. Raises KernelError.

    Where a table holds rules that only nft understands, the text has a comment in place of it.
    """
    done = run_save(variant.save, variant.name, variant.family, progress)
    if variant.name == NFT and _stopped(done):
        return _saved_one_by_one(variant, progress)
    return _output(variant, done)


def _stopped(done: Completed) -> bool:
    """Return whether iptables-nft-save has stopped at a rule that only nft understands, as 1.8.8 and later may."""
    return bool(done.status) and _UNPARSED in done.errors


def _saved_one_by_one(variant: XtablesVariant, progress: Progress) -> str:
    """Return the text of all tables, each from a separate run: a table that cannot be shown must not hide others."""
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        existing = {table.name for table in nft_tables(sock, variant.family)}
    texts = []
    for table in TABLES:
        if table in existing:
            done = run([variant.save, "-t", table], progress=progress)
            texts.append(_INCOMPATIBLE.format(table) if _stopped(done) else _output(variant, done))
    return "".join(texts)


def _output(variant: XtablesVariant, done: Completed) -> str:
    if done.status:
        program = variant.save.rsplit("/", 1)[-1]
        raise KernelError(f"{program}: {' '.join(done.errors.split()) or 'exit status ' + str(done.status)}")
    return done.output
