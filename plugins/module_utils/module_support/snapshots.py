# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The diff between a snapshot file and the objects about to be written to it, by name."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable

from ..base.errors import SnapshotError
from ..cluster.files.snapshot import canonical_snapshot, parse_snapshot, read_snapshot, snapshot_digest


def _lines(objects: Iterable[Any]) -> dict[str, str]:
    """Map each object (``Service shop/cart``) to a short digest of those of its fields that a snapshot contains."""
    content, _counts = canonical_snapshot(objects)
    lines = {}
    for item in parse_snapshot(content):
        metadata = item.get("metadata") if isinstance(item, dict) else None
        metadata = metadata if isinstance(metadata, dict) else {}
        name = "/".join(str(metadata[key]) for key in ("namespace", "name") if metadata.get(key))
        kind = str(item.get("kind")) if isinstance(item, dict) else "object"
        lines[f"{kind} {name}"] = snapshot_digest(repr(item).encode("utf-8", "replace"))[:12]
    return lines


def snapshot_difference(path: str, objects: Iterable[Any]) -> tuple[list[str], list[str]]:
    """Return one line for each object that differs: as it is in the file, and as it is in ``objects``.

    A file that is not a snapshot counts as empty; it is about to be replaced.
    """
    before: dict[str, str] = {}
    with contextlib.suppress(SnapshotError):
        before = _lines(read_snapshot(path))
    after = _lines(objects)
    differing = sorted(label for label in {**before, **after} if before.get(label) != after.get(label))
    return (
        [f"{label} {before[label]}" for label in differing if label in before],
        [f"{label} {after[label]}" for label in differing if label in after],
    )
