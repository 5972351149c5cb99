# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keeping what a convergence has programmed for the next boot, with the program that restores it then."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Iterable, List, Optional

from ..base.errors import HistoryError, ProxyError, SnapshotError, os_errors
from ..base.mode_names import NONE
from ..base.whole_files import write_whole
from ..cluster.files.cache import open_cache, write_cache
from ..cluster.parsing.objects import is_supported
from ..cluster.parsing.prune import prune
from ..convergence.request import Interfaces, Request
from ..convergence.runtime.ledger import has_converged, record_boot
from ..convergence.unchanged.inputs import Unusable, engine_digest
from .boot_directory import (
    DIRECTORY,
    PROGRAM,
    STATE,
    UNCONFIRMED,
    discard_unconfirmed,
    exists,
    forget,
    path_of,
)
from .boot_state import KIND, NextBoot
from .decisions import make_own_directory


def _settings_in(name: str) -> Dict[str, Any]:
    """Return the first object of a state, empty if there is none that can be used."""
    try:
        return next(open_cache(path_of(name)).objects(), {})
    except SnapshotError:
        return {}


def keep(
    request: Request,
    found: Optional[NextBoot],
    mode: str,
    node_name: str,
    addresses: Interfaces,
    *,
    confirmed: bool,
) -> List[str]:
    """Keep what a convergence has programmed for the next boot, or forget it with a removal; return warnings.

    A state that is not ``confirmed`` counts only when its change is. The others: as for ``Guard.after_change``.
    """
    if os.geteuid():
        # Scheduled runs of another user.
        return []
    try:
        if request.state != "present" or (found is not None and found.wanted is False):
            forget()
        elif found is not None and (found.wanted or exists()):
            settings = found.settings._replace(
                mode="" if mode == NONE else mode,
                node_name=node_name,
                outside_host=request.outside_host,
                ignore_findings=list(request.ignore_findings),
                interfaces=[list(item) for item in addresses],
                servers=sorted([claim.address, claim.port] for claim in request.cluster.given_servers),
                engine=engine_digest(),
            )
            _write({"kind": KIND, **settings._asdict()}, request.objects(), confirmed)
            if not has_converged(request.state_directory):
                record_boot(request.state_directory)
    except (ProxyError, Unusable, OSError) as error:
        return [f"what is programmed is not kept for the next boot: {error}"]
    return []


def _write(first: Dict[str, Any], objects: Iterable[Any], confirmed: bool) -> None:
    """Write a state, and the program that restores it if that is of another engine. Raises ProxyError."""
    kept, program = _settings_in(STATE), path_of(PROGRAM)
    complete = os.path.exists(program)
    unchanged = complete and first["source"] and kept == json.loads(json.dumps(first))
    if confirmed and unchanged and not os.path.lexists(path_of(UNCONFIRMED)):
        os.utime(path_of(STATE))
        return
    make_own_directory(DIRECTORY)
    if not complete or kept.get("engine") != first["engine"]:
        _write_program(program)
    small = (prune(raw, True) for raw in objects if isinstance(raw, dict) and raw.get("kind") and is_supported(raw))
    texts = [json.dumps(item, separators=(",", ":"), default=str).encode() for item in (first, *small)]
    write_cache(path_of(STATE if confirmed else UNCONFIRMED), texts, frozenset())
    if confirmed:
        discard_unconfirmed()


def _write_program(path: str) -> None:
    """Write the program that restores a state. Raises HistoryError and ConfigurationError."""
    # Imported late: only another engine than that of the last run needs this.
    from ..packaging.bytecode import with_bytecode
    from ..packaging.running import pack_running
    from . import boot

    with os_errors(HistoryError, f"{path}: cannot be written"):
        write_whole(path, with_bytecode(pack_running(boot.__name__), path))
