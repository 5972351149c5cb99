# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writing the state for the next boot, also from what runs and agents of another user than root leave.

Root restores that state, so no other user writes it: they leave a cluster state, and the settings stay those of root.
"""

from __future__ import annotations

import json
import os
from typing import Any, Iterable, Mapping

from ..base.errors import ProxyError
from ..base.installed import STATE_DIRECTORY
from ..base.whole_files import remove_file
from ..cluster.files.cache import open_cache, write_cache
from ..cluster.parsing.objects import is_supported
from ..cluster.parsing.prune import prune
from ..convergence.request import Request
from ..convergence.runtime.lock import ConvergenceLock
from . import boot_directory
from .boot_state import KIND, read

# In the state directory of the unit of scheduled runs.
_LEFT = "boot.json.gz"


def write_state(path: str, first: Mapping[str, Any], objects: Iterable[Any]) -> None:
    """Write the objects that are supported, after a first one if that is not empty. Raises SnapshotError."""
    small = (prune(raw, True) for raw in objects if isinstance(raw, dict) and raw.get("kind") and is_supported(raw))
    texts = (json.dumps(raw, separators=(",", ":"), default=str).encode() for raw in (first, *small) if raw)
    write_cache(path, texts, frozenset())


def hand_over(request: Request) -> None:
    """Leave what was programmed in the directory of the unit, on a node that keeps its state. Raises SnapshotError."""
    own = [each for each in os.environ.get("STATE_DIRECTORY", "").split(":") if each.endswith("/schedule")]
    if own and request.state == "present" and os.path.lexists(boot_directory.path_of(boot_directory.PROGRAM)):
        write_state(os.path.join(own[0], _LEFT), {}, request.objects())


def take(path: str) -> list[str]:
    """Keep the cluster state that an agent or a run of another user has left; return a warning on failure.

    A state that is newer, or beside which a change waits to be confirmed, stays.
    """
    try:
        with ConvergenceLock(STATE_DIRECTORY, boot_directory.LOCK_SECONDS):
            state = read()
            newer = state is not None and os.path.lexists(path) and os.lstat(path).st_mtime > state.renewed
            if state is not None and newer and not os.path.lexists(boot_directory.path_of(boot_directory.UNCONFIRMED)):
                first = {"kind": KIND, **state.settings._replace(source="")._asdict()}
                write_state(boot_directory.path_of(boot_directory.STATE), first, open_cache(path).objects())
            remove_file(path)
    except (ProxyError, OSError) as error:
        return [f"warning: the state for the next boot is not renewed: {error}"]
    return []
