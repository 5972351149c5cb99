# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rules of declared chains as iptables prints them.

A rule can be written in many ways, and only iptables knows how it will print one. So the declared rules are first
loaded into a separate, empty network namespace and printed from there: every mistake is found before the node is
changed, and the current rules can be compared with the declared ones text by text.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from typing import Dict, List, Optional, Sequence, Set, Tuple

from ..errors import KernelError
from ..kernel.programs import Completed
from ..kernel.xtables.chains import SavedTables, parse_save
from ..kernel.xtables.restore import DEFAULT_WAIT, failure_line
from ..kernel.xtables.variant import XtablesVariant
from ..rendering.iptables.canonical import canonical_rule, target_of
from .listed_chains import ListedChain, jump_text, section

# These options refer to objects that the empty namespace does not have.
_ELSEWHERE = re.compile(r"--match-set |--nfacct-name |(?:-j|--jump) SET |--object-pinned ")
_CLONE_NEWNET = 0x40000000


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
        raise KernelError(failure_line(variant, text, completed, DEFAULT_WAIT))
    return done.stdout.decode(errors="replace")


def _external_chains(chains: Sequence[ListedChain], saved: SavedTables) -> Set[Tuple[str, str]]:
    """Return the external chains that the rules and jumps refer to; the empty namespace needs them."""
    listed = {(chain.table, chain.name) for chain in chains}
    named: Set[Tuple[str, str]] = set()
    for chain in chains:
        named.update((chain.table, target_of(f" {rule}")) for rule in chain.rules)
        named.update((chain.table, jump.origin) for jump in chain.jumps or ())
    return {key for key in named if key in saved.chains and key not in saved.builtin and key not in listed}


def comparable(rule: str, family: str) -> str:
    """Return a current rule in the form in which canonical_chains returns it."""
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
                body.append(f"-A {jump.origin} {jump_text(chain, jump)}")
    printed = _printed_elsewhere(variant, section(lines))
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
                jump._replace(condition=text(chain.table, jump.origin, jump_text(chain, jump))) for jump in chain.jumps
            )
        result.append(chain._replace(rules=rules, jumps=jumps))
    return result


def _approximately(chain: ListedChain, family: str) -> ListedChain:
    """Return the canonical text that this module can derive without a namespace to test the rules in."""
    jumps = None
    if chain.jumps is not None:
        jumps = tuple(jump._replace(condition=canonical_rule(jump_text(chain, jump), family)) for jump in chain.jumps)
    return chain._replace(rules=tuple(canonical_rule(rule, family) for rule in chain.rules), jumps=jumps)
