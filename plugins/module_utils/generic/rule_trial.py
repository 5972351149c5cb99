# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Load rules into an empty network namespace, which ends with the thread that created it.

The node's own tables and its xtables lock are not involved: the programs of the legacy variant use a lock file of
their own there.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Collection, Dict, Mapping, Optional

from ..base.errors import KernelError
from ..kernel.ipset.names import set_names
from ..kernel.ipset.sets import IpsetSocket
from ..kernel.programs import run
from ..kernel.xtables.restore import failure_line
from ..kernel.xtables.variant import XtablesVariant
from ..rendering.ipvs.model import SetDefinition

_CLONE_NEWNET = 0x40000000
# The lock file is the input, a file in memory that no other program locks.
_SCRIPT = 'XTABLES_LOCKFILE=/proc/self/fd/0; export XTABLES_LOCKFILE; "$1" $3 --noflush && exec "$2"'


def _unshare() -> None:
    """Move the calling thread into an empty network namespace. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def _set_like(own: SetDefinition, family: str) -> SetDefinition:
    """Return a definition that a rule of the family accepts exactly if it accepts the node's own set.

    Rules depend on a set's family only. A hash of addresses needs no further settings, so it replaces types that do,
    and those without a family, which suit rules of both.
    """
    plain = own.family and own.type.startswith("hash:")
    return SetDefinition(own.type if plain else "hash:ip", own.family or family)


def _copies_of(names: Collection[str], family: str) -> Dict[str, SetDefinition]:
    """Return what to create in place of those of the named ipsets that exist. Raises KernelError."""
    if not set(set_names()).intersection(names):
        return {}
    with IpsetSocket() as sock:
        found = sock.headers()
    return {name: _set_like(own, family) for name, own in found.items() if name in names}


def _printed_there(variant: XtablesVariant, text: str, sets: Mapping[str, SetDefinition], wait: float) -> Optional[str]:
    """Do the work of :func:`printed_elsewhere` in a thread, which the new namespace belongs to alone."""
    try:
        _unshare()
    except OSError:
        return None
    if sets:
        with IpsetSocket() as sock:
            sock.create(sets)
    # Programs that do not know the variable of the lock file wait for the node's lock.
    waiting = f"-w {max(1, round(wait))}" if variant.restore_waits else ""
    done = run(["/bin/sh", "-c", _SCRIPT, "sh", variant.restore, variant.save, waiting], text)
    if done.status:
        raise KernelError(failure_line(variant, text, done, wait))
    return done.output


def printed_elsewhere(variant: XtablesVariant, text: str, sets: Collection[str], wait: float) -> Optional[str]:
    """Return what iptables-save prints after ``text`` was restored in an empty namespace.

    ``sets``: the names of ipsets that the rules may refer to; those that exist have an empty copy there. None without
    the right to create a namespace. Raises KernelError naming the line that iptables refuses.
    """
    copies = _copies_of(sets, variant.family) if sets else {}
    with ThreadPoolExecutor(max_workers=1) as elsewhere:
        return elsewhere.submit(_printed_there, variant, text, copies, wait).result()
