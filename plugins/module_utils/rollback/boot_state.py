# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file from which a node is converged at its next boot: the cluster state and the settings of a convergence.

It has the format of the agent's copy of the cluster state, with the settings as its first object. It is written after a
convergence is complete, and replaced as a whole, so a power cut at any moment leaves the old or the new state.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Mapping, NamedTuple, Optional

from ..base.errors import HistoryError, SnapshotError
from ..cluster.files.cache import open_cache
from .boot_directory import STATE, exists, path_of

KIND = "BootSettings"
"""The kind of the first object."""


class BootSettings(NamedTuple):
    """The options of a convergence beside the cluster state, as JSON values.

    ``configuration``, ``node_configuration``: the fields of both documents. ``interfaces``: name and address of each
    interface, which may have none while the node boots. ``servers``: address and port of the API servers. ``source``:
    the digest of the cluster state's file, empty if it is no file. ``engine``: the digest of the engine, which is that
    of the program. ``program``: the CRC-32 of the program's file, by which a damaged one is written again. ``machine``:
    the identity of the node's system (machine-id(5)). ``kept_off``: whether ``migrate`` kept kube-proxy off the node.
    """

    configuration: Mapping[str, Any] = {}
    node_configuration: Optional[Mapping[str, Any]] = None
    mode: str = ""
    node_name: str = ""
    outside_host: bool = False
    ignore_findings: list[str] = []
    interfaces: list[list[str]] = []
    servers: list[list[Any]] = []
    source: str = ""
    engine: str = ""
    program: int = 0
    machine: str = ""
    kept_off: bool = False


class NextBoot(NamedTuple):
    """What a convergence has for the next boot, beside its request.

    ``wanted``: True to keep its result, False to keep none, None to do as the run before.
    """

    settings: BootSettings
    wanted: Optional[bool]


class BootState(NamedTuple):
    """A state that was read: its settings, the raw objects of the cluster, and when the last run wrote or renewed it.

    ``renewed``: in seconds since the epoch, by the clock of that run.
    """

    settings: BootSettings
    objects: list[dict[str, Any]]
    renewed: float

    @property
    def age(self) -> float:
        """In seconds; a state of the future, by the node's clock, is new."""
        return time.time() - self.renewed


def read(copy: str = "") -> Optional[BootState]:
    """Return the state of the last complete and confirmed convergence, None without one. Raises HistoryError.

    ``copy``: the path of the agent's copy of the cluster state, whose objects are those of the state where it is newer.
    """
    path = path_of(STATE)
    if not exists() or not os.path.lexists(path):
        return None
    try:
        first, *objects = open_cache(path).objects()
        if first.pop("kind", None) != KIND:
            raise SnapshotError(f"{path}: does not begin with the settings of a convergence")
        return _with_newer(BootState(BootSettings(**first), objects, os.lstat(path).st_mtime), copy)
    except SnapshotError as error:
        raise HistoryError(str(error)) from error
    except (OSError, TypeError, ValueError) as error:
        raise HistoryError(f"{path}: {error}") from error


def _with_newer(state: BootState, copy: str) -> BootState:
    with contextlib.suppress(OSError, SnapshotError):
        renewed = os.lstat(copy).st_mtime
        if renewed > state.renewed:
            return state._replace(objects=list(open_cache(copy).objects()), renewed=renewed)
    return state
