# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keeping what a convergence has programmed for the next boot, with the program that restores it then."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any, Iterable, Optional

from ..base.errors import HistoryError, ProxyError, SnapshotError, os_errors
from ..base.installed import KEPT_OFF_FILE
from ..base.mode_names import NONE
from ..base.regular_files import read_regular
from ..base.whole_files import write_whole
from ..cluster.files.cache import MOST_BYTES, open_cache
from ..convergence.request import Interfaces, Request
from ..convergence.runtime.ledger import has_converged, record_boot
from ..convergence.unchanged.inputs import Unusable, engine_digest
from ..kernel.facts import machine_identity
from . import boot_directory
from .boot_handover import hand_over, write_state
from .boot_state import KIND, NextBoot
from .decisions import make_own_directory, remove_unfinished


def _settings_in(name: str) -> dict[str, Any]:
    """Return the first object of a state, empty if there is none that can be used."""
    try:
        return next(open_cache(boot_directory.path_of(name)).objects(), {})
    except SnapshotError:
        return {}


def keep(
    request: Request,
    found: Optional[NextBoot],
    modes: tuple[str, str],
    node_name: str,
    addresses: Interfaces,
    *,
    confirmed: bool,
) -> list[str]:
    """Keep what a convergence has programmed for the next boot, or forget it with a removal; return warnings.

    A state that is not ``confirmed`` counts only when its change is. ``modes``: the mode in effect, and what filters
    beside IPVS, which programs that start later would let a boot choose otherwise. The others: as for
    ``Guard.after_change``.
    """
    try:
        if os.geteuid():
            hand_over(request)
        elif request.state != "present" or (found is not None and found.wanted is False):
            boot_directory.forget()
        elif found is not None and (found.wanted or boot_directory.exists()):
            (mode, backend), own = modes, found.settings.node_configuration
            settings = found.settings._replace(
                node_configuration={**(own or {}), "ipvsFilterBackend": backend} if backend else own,
                mode="" if mode == NONE else mode,
                node_name=node_name,
                outside_host=request.outside_host,
                ignore_findings=list(request.ignore_findings),
                interfaces=[list(item) for item in addresses],
                servers=sorted([claim.address, claim.port] for claim in request.cluster.given_servers),
                engine=engine_digest(),
                machine=machine_identity(),
                kept_off=os.path.lexists(KEPT_OFF_FILE),
            )
            _write({"kind": KIND, **settings._asdict()}, request.objects(), confirmed)
            if not has_converged(request.state_directory):
                record_boot(request.state_directory)
    except (ProxyError, Unusable, OSError) as error:
        return [f"what is programmed is not kept for the next boot: {error}"]
    return []


def _write(first: dict[str, Any], objects: Iterable[Any], confirmed: bool) -> None:
    """Write a state, and the program that restores it if that is damaged or of another engine. Raises ProxyError."""
    kept, program = _settings_in(boot_directory.STATE), boot_directory.path_of(boot_directory.PROGRAM)
    first["program"] = _checksum(program)
    intact = first["program"] and (first["program"], first["engine"]) == (kept.get("program"), kept.get("engine"))
    unchanged = intact and first["source"] and kept == json.loads(json.dumps(first))
    if confirmed and unchanged and not os.path.lexists(boot_directory.path_of(boot_directory.UNCONFIRMED)):
        os.utime(boot_directory.path_of(boot_directory.STATE))
        return
    make_own_directory(boot_directory.DIRECTORY)
    # Scheduled runs of another user show the age of the state.
    os.chmod(boot_directory.DIRECTORY, 0o711)
    if not intact:
        _write_program(program)
        first["program"] = _checksum(program)
    name = boot_directory.STATE if confirmed else boot_directory.UNCONFIRMED
    write_state(boot_directory.path_of(name), first, objects)
    if confirmed:
        boot_directory.discard_unconfirmed()
    remove_unfinished(boot_directory.DIRECTORY)


def _checksum(path: str) -> int:
    """Return the CRC-32 of a file, 0 if it cannot be read."""
    try:
        return zlib.crc32(read_regular(path, MOST_BYTES))
    except OSError:
        return 0


def _write_program(path: str) -> None:
    """Write the program that restores a state. Raises HistoryError and ConfigurationError."""
    # Imported late: only another engine than that of the last run needs this.
    from ..packaging.bytecode import with_bytecode
    from ..packaging.running import pack_running
    from . import boot

    with os_errors(HistoryError, f"{path}: cannot be written"):
        write_whole(path, with_bytecode(pack_running(boot.__name__), path))
