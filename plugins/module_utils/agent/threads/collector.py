# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tune garbage collection while the cluster is loaded, and return freed memory to the system.

Collections are triggered by allocations. Almost everything that a start creates is kept and has no cycles, so visiting
it took half of the processor time of a start.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

#: How often to collect cycles while the cluster is awaited, which may be for days: failed requests leave some.
COLLECT_SECONDS = 60.0
#: New objects before the collector visits them while the cluster is loaded; Python's own threshold is 700 to 2,000.
_WHILE_LOADING = 1_000_000
_usual = gc.get_threshold()


def begin_loading() -> None:
    """Let the collector run rarely. The caller collects every COLLECT_SECONDS until :func:`end_loading`."""
    gc.set_threshold(_WHILE_LOADING, *_usual[1:])


def collect() -> None:
    """Collect cycles now."""
    gc.collect()


def end_loading() -> None:
    """Collect the existing cycles, exclude all existing objects from later collections, and let those run as usual."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_usual)


def trim_memory() -> None:
    """Return memory that the start needed to the system, if the C library supports that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
